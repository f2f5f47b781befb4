#include <tandem/parallel/comm/store_server.h>

#include <fcntl.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <unordered_map>

#include <asio.hpp>

#include <tandem/parallel/comm/store_limits.h>
#include <tandem/parallel/comm/store_protocol.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

using asio::ip::tcp;
using namespace store_protocol;

constexpr std::size_t kMaxConnections = 4096;
// The end of a connection is seen before its process can be waited for; a launcher knows more a moment later.
constexpr auto kLauncherTime = std::chrono::milliseconds(300);

std::optional<int> number(std::string_view text) {
  int value = -1;
  const auto [at, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool good = error == std::errc() && at == text.data() + text.size() && value >= 0;
  return good ? std::optional(value) : std::nullopt;
}

std::optional<int> rank_of_ended(std::string_view key) {
  return key.starts_with(kEndedPrefix) ? number(key.substr(kEndedPrefix.size())) : std::nullopt;
}

class Session;

// The keys, who waits for them, and which ranks are there. Used by the server's thread alone.
class Hub {
 public:
  Hub(asio::io_context& io, bool launched) : io_(io), launched_(launched) {}
  /// With `wait` the answer comes later: the key is not there yet.
  Reply handle(const Request& request, bool& wait);
  void join(int rank);
  void leave(int rank);
  void connection_ended(int rank);
  void report_end(int rank, const std::string& text);
  /// Whether a rank was lost and others than the store's holder are there.
  bool others_may_ask() const;
  std::set<std::shared_ptr<Session>>& sessions() { return sessions_; }

 private:
  void put(const std::string& key, const std::string& value);
  void wake(const std::string& key);

  asio::io_context& io_;
  const bool launched_;
  std::unordered_map<std::string, std::string> values_;
  std::size_t bytes_ = 0;
  std::set<std::shared_ptr<Session>> sessions_;
  std::multiset<int> present_;  // a rank may join again while something still holds its former store
  std::set<int> left_;
  std::map<int, std::string> lost_;
};

// One connection. Reads requests one after the other; a handshake would come before `kGreeting` is answered.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(tcp::socket socket, Hub& hub) : socket_(std::move(socket)), hub_(hub) {}

  void read() {
    socket_.async_read_some(asio::buffer(bytes_),
                            [self = shared_from_this()](const asio::error_code& e, std::size_t n) {
                              if (e) return self->end();
                              self->reader_.feed({self->bytes_, n});
                              if (self->reader_.overfull()) return self->end();
                              self->process();
                              if (self->socket_.is_open()) self->read();
                            });
  }
  void reply(const Reply& r) {
    waits_for_.clear();
    answering_ = true;
    outgoing_ = encode(r);
    asio::async_write(socket_, asio::buffer(outgoing_),
                      [self = shared_from_this()](const asio::error_code& e, std::size_t) {
                        self->outgoing_ = {};
                        self->answering_ = false;
                        if (e) return self->end();
                        self->process();
                      });
  }
  const std::string& waits_for() const { return waits_for_; }

 private:
  void process() {
    if (answering_ || !waits_for_.empty() || !socket_.is_open()) return;
    try {
      const std::optional<std::string> message = reader_.next();
      if (!message) return;
      Request request = parse_request(*message);
      if (!greeted_) return greet(request);
      if (request.command == Command::goodbye && rank_ >= 0) {
        hub_.leave(std::exchange(rank_, -1));
        return reply({});
      }
      bool wait = false;
      const Reply r = hub_.handle(request, wait);
      if (!wait) return reply(r);
      waits_for_ = std::move(request.key);
    } catch (const Error&) {
      end();
    }
  }
  void greet(const Request& request) {
    if (request.command != Command::hello || request.key != kGreeting) return end();
    if (!request.value.empty()) {
      const std::optional<int> rank = number(request.value);
      if (!rank) return end();
      rank_ = *rank;
      hub_.join(rank_);
    }
    greeted_ = true;
    reply({});
  }
  void end() {
    asio::error_code ignored;
    socket_.close(ignored);
    if (hub_.sessions().erase(shared_from_this()) == 0) return;
    if (rank_ >= 0) hub_.connection_ended(std::exchange(rank_, -1));
  }

  tcp::socket socket_;
  Hub& hub_;
  char bytes_[16384];
  MessageReader reader_;
  std::string outgoing_, waits_for_;
  bool greeted_ = false, answering_ = false;
  int rank_ = -1;
};

Reply Hub::handle(const Request& r, bool& wait) {
  try {
    if (r.command != Command::num_keys) check_sizes(r.key, r.value);
    const auto found = values_.find(r.key);
    const bool there = found != values_.end();
    switch (r.command) {
      case Command::set:
        if (const std::optional<int> rank = rank_of_ended(r.key))
          report_end(*rank, r.value);
        else
          put(r.key, r.value);
        return {};
      case Command::get:
        if (there) return {Status::ok, found->second};
        if (!lost_.empty()) return {Status::lost, fmt::format("{} {}", lost_.begin()->first, lost_.begin()->second)};
        wait = true;
        return {};
      case Command::check:
        return {there ? Status::ok : Status::missing, {}};
      case Command::add: {
        const std::int64_t sum = add_to(r.key, there ? found->second : "", add_to("amount", r.value, 0));
        put(r.key, std::to_string(sum));
        return {Status::ok, std::to_string(sum)};
      }
      case Command::compare_set:
        if (there ? found->second == r.expected : r.expected.empty()) {
          put(r.key, r.value);
          return {Status::ok, r.value};
        }
        return {Status::ok, there ? found->second : ""};
      case Command::remove:
        if (!there) return {Status::missing, {}};
        bytes_ -= r.key.size() + found->second.size();
        values_.erase(found);
        return {};
      case Command::num_keys:
        return {Status::ok, std::to_string(values_.size())};
      default:
        return {Status::refused, "[store] the command is not allowed here"};
    }
  } catch (const Error& e) {
    return {Status::refused, e.what()};
  }
}

void Hub::put(const std::string& key, const std::string& value) {
  const auto found = values_.find(key);
  const std::size_t before = found == values_.end() ? 0 : key.size() + found->second.size();
  const std::size_t after = bytes_ - before + key.size() + value.size();
  check(after <= kMaxStoreBytes, "store", "the store is full: {} bytes are allowed; remove keys", kMaxStoreBytes);
  bytes_ = after;
  values_[key] = value;
  wake(key);
}

void Hub::wake(const std::string& key) {
  const std::string value = values_[key];
  for (const auto& session : sessions_)
    if (session->waits_for() == key) session->reply({Status::ok, value});
}

void Hub::join(int rank) {
  present_.insert(rank);
  left_.erase(rank);
  lost_.erase(rank);
  const auto found = values_.find(ended_key(rank));
  if (found == values_.end()) return;
  bytes_ -= found->first.size() + found->second.size();
  values_.erase(found);
}

void Hub::leave(int rank) {
  present_.erase(present_.find(rank));
  if (present_.count(rank) != 0) return;
  left_.insert(rank);
  put(ended_key(rank), "has left the job");
}

void Hub::connection_ended(int rank) {
  present_.erase(present_.find(rank));
  if (present_.count(rank) != 0) return;
  if (!launched_) return report_end(rank, "has ended");
  auto timer = std::make_shared<asio::steady_timer>(io_, kLauncherTime);
  timer->async_wait([this, rank, timer](const asio::error_code&) {
    if (values_.count(ended_key(rank)) == 0 && present_.count(rank) == 0) report_end(rank, "has ended");
  });
}

bool Hub::others_may_ask() const {
  return !lost_.empty() && std::any_of(present_.begin(), present_.end(), [](int rank) { return rank != 0; });
}

void Hub::report_end(int rank, const std::string& text) {
  try {
    put(ended_key(rank), text);
  } catch (const Error&) {  // the store is full; the rank is lost all the same
  }
  if (left_.count(rank) != 0) return;
  lost_.emplace(rank, text);
  for (const auto& session : sessions_)
    if (!session->waits_for().empty()) session->reply({Status::lost, fmt::format("{} {}", rank, text)});
}

}  // namespace

struct StoreServer::State {
  explicit State(bool launched) : hub(io, launched) {}

  void accept() {
    acceptor.async_accept([this](const asio::error_code& e, tcp::socket socket) {
      if (e == asio::error::operation_aborted) return;
      if (e) {  // such as too many open files: some will be closed
        retry.expires_after(std::chrono::milliseconds(50));
        return retry.async_wait([this](const asio::error_code& stopped) {
          if (!stopped) accept();
        });
      }
      fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
      if (hub.sessions().size() < kMaxConnections) {
        asio::error_code ignored;
        socket.set_option(tcp::no_delay(true), ignored);
        const auto session = std::make_shared<Session>(std::move(socket), hub);
        hub.sessions().insert(session);
        session->read();
      }
      accept();
    });
  }

  asio::io_context io{1};
  tcp::acceptor acceptor{io};
  asio::steady_timer retry{io};
  Hub hub;
  int port = 0;
  std::thread thread;
};

StoreServer::StoreServer(const StoreServerOptions& options) : state_(std::make_unique<State>(options.launched)) {
  check(options.port >= 0 && options.port <= 65535, "store", "port {} is out of range: give 0 to 65535", options.port);
  try {
    tcp::resolver resolver(state_->io);
    const tcp::endpoint address = *resolver.resolve(options.host, std::to_string(options.port)).begin();
    state_->acceptor.open(address.protocol());
    fcntl(state_->acceptor.native_handle(), F_SETFD, FD_CLOEXEC);
    state_->acceptor.set_option(tcp::acceptor::reuse_address(true));
    state_->acceptor.bind(address);
    state_->acceptor.listen();
    state_->port = state_->acceptor.local_endpoint().port();
  } catch (const asio::system_error& e) {
    fail("store", "cannot listen on {}:{}: {}{}", options.host, options.port, e.code().message(),
         e.code() == asio::error::address_in_use
             ? "; another program uses the port, so choose another MASTER_PORT"
             : "; MASTER_ADDR must be an address of the host of rank 0, which holds the store");
  }
}

// Where a rank was lost, the others may still ask who: they get an answer while they are there, for at most a second.
StoreServer::~StoreServer() {
  for (int i = 0; i < 50 && state_->thread.joinable(); ++i) {
    const auto needed = std::make_shared<std::promise<bool>>();
    asio::post(state_->io, [this, needed] { needed->set_value(state_->hub.others_may_ask()); });
    if (auto answer = needed->get_future();
        answer.wait_for(std::chrono::seconds(1)) != std::future_status::ready || !answer.get())
      break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  state_->io.stop();
  if (state_->thread.joinable()) state_->thread.join();
}

void StoreServer::start() {
  state_->accept();
  state_->thread = std::thread([this] { state_->io.run(); });
}

void StoreServer::begin_restart(int) {}

int StoreServer::port() const { return state_->port; }

void StoreServer::report_end(int rank, const std::string& text) {
  asio::post(state_->io, [this, rank, text] { state_->hub.report_end(rank, text); });
}

}  // namespace tandem::parallel
