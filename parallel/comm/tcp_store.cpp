#include <tandem/parallel/comm/tcp_store.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include <asio.hpp>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/store_errors.h>
#include <tandem/parallel/comm/store_handshake.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/parallel/comm/store_protocol.h>
#include <tandem/parallel/comm/store_silence.h>

namespace tandem::parallel {
namespace {

using asio::ip::tcp;
using namespace store_protocol;
using Clock = std::chrono::steady_clock;

constexpr double kGoodbyeSeconds = 1;  // at most
constexpr auto kReconnectTime = std::chrono::milliseconds(50);
constexpr int kRejections = 3;  // of this process's proof, until it is believed to be wrong

struct TimedOut {};
struct Rejected {};  // the server has not accepted the proof
struct Impostor {};  // who answers has none

// A connection for one request at a time, whose operations end at a deadline.
class Connection {
 public:
  Connection(const TCPStoreOptions& options, const Identity& who, Clock::time_point deadline) {
    tcp::resolver resolver(io_);
    const auto addresses = resolver.resolve(options.host, std::to_string(options.port));
    asio::async_connect(socket_, addresses, [this](const asio::error_code& e, const tcp::endpoint&) { error_ = e; });
    run(deadline);
    fcntl(socket_.native_handle(), F_SETFD, FD_CLOEXEC);
    socket_.set_option(tcp::no_delay(true));
    const std::string nonce = read_exactly(kNonceBytes, deadline);
    const std::string greeting = make_greeting(who, options.secret, nonce);
    write(greeting, deadline);
    std::string answer;
    try {
      answer = read_exactly(kProofBytes, deadline);
    } catch (const asio::system_error& e) {
      if (e.code() == asio::error::eof) throw Rejected();
      throw;
    }
    if (!equal_proofs(answer, answer_to(greeting, options.secret, nonce))) throw Impostor();
    welcome_ = reply(deadline);
  }

  /// What the server has said to the greeting.
  const Reply& welcome() const { return welcome_; }

  Reply request(const Request& r, Clock::time_point deadline) {
    write(encode(r), deadline);
    return reply(deadline);
  }

 private:
  void write(const std::string& bytes, Clock::time_point deadline) {
    asio::async_write(socket_, asio::buffer(bytes), [this](const asio::error_code& e, std::size_t) { error_ = e; });
    run(deadline);
  }
  std::string read_exactly(std::size_t count, Clock::time_point deadline) {
    std::string bytes(count, '\0');
    asio::async_read(socket_, asio::buffer(bytes), [this](const asio::error_code& e, std::size_t) { error_ = e; });
    run(deadline);
    return bytes;
  }
  Reply reply(Clock::time_point deadline) {
    for (;;) {
      if (const std::optional<std::string> message = reader_.next()) return parse_reply(*message);
      std::size_t n = 0;
      socket_.async_read_some(asio::buffer(bytes_), [this, &n](const asio::error_code& e, std::size_t count) {
        error_ = e;
        n = count;
      });
      run(deadline);
      reader_.feed({bytes_, n});
    }
  }
  void run(Clock::time_point deadline) {
    io_.restart();
    io_.run_until(deadline);
    if (!io_.stopped()) {
      socket_.close();
      io_.run();
      throw TimedOut();
    }
    if (error_) throw asio::system_error(error_);
  }

  asio::io_context io_{1};
  tcp::socket socket_{io_};
  asio::error_code error_;
  char bytes_[16384];
  MessageReader reader_;
  Reply welcome_;
};

bool out_of_files(const asio::error_code& e) {
  return e == asio::error::no_descriptors || e == std::errc::too_many_files_open_in_system;
}

}  // namespace

// One connection stands for the rank's presence and carries no requests, so that none has to be broken off on it. For
// requests there are as many as there are threads that ask at once.
struct TCPStore::State {
  TCPStoreOptions options;
  pid_t process = getpid();
  std::string token = process_token();
  std::unique_ptr<Connection> presence;
  std::mutex mutex;
  std::vector<std::unique_ptr<Connection>> idle;
  std::atomic<bool> silent = false;  // the last answer did not come

  std::string me() const { return options.restart == -1 ? "" : who(options.rank, options.world_size); }
  std::string address() const { return fmt::format("{}:{}", options.host, options.port); }
  std::string holder() const { return options.holder < 0 ? "the launcher" : fmt::format("rank {}", options.holder); }
  static Clock::time_point after(double seconds) { return Clock::now() + clock_ticks(seconds); }

  // What the server refuses, to this process or to a request.
  [[noreturn]] void refused(const Reply& reply) const {
    if (reply.status == Status::refused) throw Error(reply.value);
    throw CommError(-1, me() + reply.value);
  }

  [[noreturn]] void no_files(const asio::error_code& e) const {
    throw CommError(-1, fmt::format("{}this process cannot connect to the store at {}: {}; raise `ulimit -n`", me(),
                                    address(), e.message()));
  }

  // A server that is flooded by strangers resets connections that it has no time for; those come again.
  std::unique_ptr<Connection> connect(int rank, Clock::time_point deadline) const {
    const Identity who{.rank = rank, .world_size = options.world_size, .restart = options.restart, .token = token};
    for (int rejected = 0;;) {
      try {
        auto connection = std::make_unique<Connection>(options, who, deadline);
        const Reply& welcome = connection->welcome();
        if (welcome.status == Status::ok) return connection;
        throw CommError(-1, fmt::format("{}the store at {} refuses this process: {}", me(), address(), welcome.value));
      } catch (const Impostor&) {
        throw CommError(-1,
                        fmt::format("{}what answers at {} does not know the job's secret: it is another program, or "
                                    "the store of another job; see that MASTER_ADDR and MASTER_PORT are this job's",
                                    me(), address()));
      } catch (const Rejected&) {  // a server that ends does the same
        if (++rejected == kRejections)
          throw CommError(-1, fmt::format("{}the store at {} did not accept this process's secret; {} must name the "
                                          "same file on all hosts, and a job that is started without it must not use "
                                          "this MASTER_PORT",
                                          me(), address(), kSecretFileVariable));
      } catch (const asio::system_error& e) {
        if (out_of_files(e.code())) no_files(e.code());
        const bool reset = e.code() == asio::error::connection_reset || e.code() == asio::error::broken_pipe;
        if (!reset || Clock::now() + kReconnectTime >= deadline) throw;
      }
      std::this_thread::sleep_for(kReconnectTime);
    }
  }

  // The same, while the server may not have come yet.
  std::unique_ptr<Connection> connect_first(int rank) const {
    const auto deadline = after(options.timeout_seconds);
    for (;;) {
      std::string why = "it does not answer";
      try {
        return connect(rank, deadline);
      } catch (const asio::system_error& e) {
        why = e.code().message();
      } catch (const TimedOut&) {
      }
      if (Clock::now() + kReconnectTime >= deadline)
        throw CommError(-1,
                        fmt::format("{}waited {} s for the store at {}: {}; rank 0 or the launcher holds it, so see "
                                    "that it runs, and that MASTER_ADDR and MASTER_PORT are the same on every rank",
                                    me(), options.timeout_seconds, address(), why));
      std::this_thread::sleep_for(kReconnectTime);
    }
  }

  Reply request(const Request& r, Clock::time_point deadline) {
    check_process(process);
    std::unique_ptr<Connection> connection;
    {
      const std::lock_guard lock(mutex);
      if (!idle.empty()) {
        connection = std::move(idle.back());
        idle.pop_back();
      }
    }
    try {
      if (!connection) connection = connect(-1, deadline);
      Reply reply = connection->request(r, deadline);
      if (reply.status == Status::stale) refused(reply);
      const std::lock_guard lock(mutex);
      idle.push_back(std::move(connection));
      if (reply.status == Status::refused) refused(reply);
      return reply;
    } catch (const asio::system_error& e) {
      throw CommError(options.holder, fmt::format("{}the store at {} is lost: {}; {}, which held it, has ended", me(),
                                                  address(), e.code().message(), holder()));
    }
  }

  // A request that needs no other rank.
  Reply ask(const Request& r) {
    try {
      Reply reply = request(r, after(AnswerLimit::within(options.timeout_seconds)));
      silent = false;
      return reply;
    } catch (const TimedOut&) {
      silent = true;
      throw SilentStore(options.holder,
                        fmt::format("{}the store at {} does not answer: {}, which holds it, is stopped or overloaded",
                                    me(), address(), holder()));
    }
  }
};

TCPStore::TCPStore(const TCPStoreOptions& options) : state_(std::make_unique<State>()) {
  tandem::check(options.port > 0 && options.port <= 65535, "store", "port {} is out of range: give 1 to 65535",
                options.port);
  tandem::check(options.rank < 0 || options.rank < options.world_size, "store", "rank {} is out of range of {} ranks",
                options.rank, options.world_size);
  state_->options = options;
  state_->options.timeout_seconds = usable_timeout("store", options.timeout_seconds);
  state_->idle.push_back(state_->connect_first(-1));
  if (options.rank >= 0) state_->presence = state_->connect_first(options.rank);
}

TCPStore::~TCPStore() {
  if (!state_->presence || state_->silent) return;
  if (getpid() != state_->process) return;  // a child that ends is not the rank
  try {
    state_->presence->request({.command = Command::goodbye},
                              State::after(std::min(kGoodbyeSeconds, state_->options.timeout_seconds)));
  } catch (...) {  // the server is gone, or slow; nobody waits for this rank any more
  }
}

void TCPStore::set(std::string_view key, std::string_view value) {
  check_sizes(key, value);
  state_->ask({.command = Command::set, .key = std::string(key), .value = std::string(value)});
}

std::string TCPStore::get(std::string_view key, std::optional<double> timeout_seconds) {
  check_sizes(key, {});
  const double seconds =
      AnswerLimit::within(usable_timeout("store", timeout_seconds.value_or(this->timeout_seconds())));
  Reply reply;
  try {
    reply = state_->request({.command = Command::get, .key = std::string(key)}, State::after(seconds));
  } catch (const TimedOut&) {
    throw keys_missing(*this, seconds, {std::string(key)});
  }
  if (reply.status != Status::lost) return reply.value;
  int rank = -1;
  const std::string_view text = reply.value;
  const std::size_t blank = std::min(text.find(' '), text.size());
  std::from_chars(text.data(), text.data() + blank, rank);
  throw lost_while_waiting(*this, rank, text.substr(std::min(blank + 1, text.size())), key);
}

bool TCPStore::check(std::string_view key) {
  check_sizes(key, {});
  return state_->ask({.command = Command::check, .key = std::string(key)}).status == Status::ok;
}

std::int64_t TCPStore::add(std::string_view key, std::int64_t amount) {
  check_sizes(key, {});
  return add_to(
      key, state_->ask({.command = Command::add, .key = std::string(key), .value = std::to_string(amount)}).value, 0);
}

std::string TCPStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  check_sizes(key, expected);
  check_sizes(key, desired);
  return state_
      ->ask({.command = Command::compare_set,
             .key = std::string(key),
             .value = std::string(desired),
             .expected = std::string(expected)})
      .value;
}

bool TCPStore::remove(std::string_view key) {
  check_sizes(key, {});
  return state_->ask({.command = Command::remove, .key = std::string(key)}).status == Status::ok;
}

std::int64_t TCPStore::num_keys(std::string_view prefix) {
  if (!prefix.empty()) check_sizes(prefix, {});
  return add_to("number of keys", state_->ask({.command = Command::num_keys, .key = std::string(prefix)}).value, 0);
}

double TCPStore::timeout_seconds() const { return state_->options.timeout_seconds; }
Store::Names TCPStore::names() const { return {state_->me(), "the store at " + state_->address()}; }

}  // namespace tandem::parallel
