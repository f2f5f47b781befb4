#include <tandem/parallel/comm/store_server.h>

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include <asio.hpp>

#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/store_hub.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/error.h>

namespace tandem::parallel {
namespace {

using asio::ip::tcp;
using namespace store_protocol;

// The end of a connection is seen before its process can be waited for; a launcher knows more a moment later.
constexpr auto kLauncherTime = std::chrono::milliseconds(300);
// A newcomer is not ended for another one before this has passed. It also bounds what a flood of strangers costs.
constexpr auto kGraceTime = std::chrono::milliseconds(50);
constexpr auto kRetryTime = std::chrono::milliseconds(50);
constexpr auto kProofTime =
    std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(kProofSeconds));

class Session;

// What the sessions share. Used by the server's thread alone.
struct Office {
  Office(bool launched, std::string job_secret) : hub(launched), secret(std::move(job_secret)) {}

  asio::io_context io{1};
  StoreHub hub;
  const std::string secret;
  std::set<std::shared_ptr<Session>> proved;
  std::vector<std::shared_ptr<Session>> unproved;  // the oldest first
};

// One connection: the handshake, for which a stranger gets a buffer of kGreetingBytes, then one request after the
// other.
class Session final : public StoreHub::Client, public std::enable_shared_from_this<Session> {
 public:
  /// `full`: why the server cannot take more clients; who proves the secret is told. Empty when it can.
  Session(tcp::socket socket, Office& office, std::string full)
      : socket_(std::move(socket)), office_(office), full_(std::move(full)), limit_(office.io) {}

  void start() {
    limit_.expires_after(kProofTime);
    limit_.async_wait([self = shared_from_this()](const asio::error_code& e) {
      if (!e) self->give_up();
    });
    asio::async_write(socket_, asio::buffer(nonce_),
                      [self = shared_from_this()](const asio::error_code& e, std::size_t) {
                        return e ? self->end() : self->read_greeting();
                      });
  }

  std::chrono::steady_clock::time_point since() const { return since_; }

  /// Ends a connection that has not failed: a client that is told so by a reset comes again.
  void give_up() {
    asio::error_code ignored;
    socket_.set_option(asio::socket_base::linger(true, 0), ignored);
    end();
  }

  void answer(const Reply& reply, bool last) override {
    answering_ = true;
    last_ = last;
    outgoing_ += encode(reply);
    asio::async_write(socket_, asio::buffer(outgoing_),
                      [self = shared_from_this()](const asio::error_code& e, std::size_t) {
                        self->outgoing_.clear();
                        self->answering_ = false;
                        if (e || self->last_) return self->end();
                        self->process();
                      });
  }

 private:
  void read_greeting() {
    asio::async_read(socket_, asio::buffer(greeting_),
                     [self = shared_from_this()](const asio::error_code& e, std::size_t) {
                       if (e) return self->end();
                       try {
                         self->greet();
                       } catch (const Error&) {
                         self->end();
                       }
                     });
  }

  void greet() {
    const std::string_view greeting(greeting_.data(), greeting_.size());
    const std::optional<Identity> proven = store_protocol::read_greeting(greeting, office_.secret, nonce_);
    if (!proven || !std::erase(office_.unproved, shared_from_this())) return end();
    office_.proved.insert(shared_from_this());
    limit_.cancel();
    who = *proven;
    outgoing_ = answer_to(greeting, office_.secret, nonce_);
    bytes_.resize(kReadBytes);
    if (!full_.empty()) return answer({Status::refused, full_}, true);
    office_.hub.join(*this);
    read();
  }

  void read() {
    socket_.async_read_some(asio::buffer(bytes_),
                            [self = shared_from_this()](const asio::error_code& e, std::size_t n) {
                              if (e) return self->end();
                              self->reader_.feed({self->bytes_.data(), n});
                              if (self->reader_.overfull()) return self->end();
                              self->process();
                              if (self->socket_.is_open()) self->read();
                            });
  }

  void process() {
    if (answering_ || !waits_for.empty() || !socket_.is_open()) return;
    try {
      if (const std::optional<std::string> message = reader_.next())
        office_.hub.request(*this, parse_request(*message));
    } catch (const Error&) {
      end();
    }
  }

  void end() {
    asio::error_code ignored;
    socket_.close(ignored);
    limit_.cancel();
    std::erase(office_.unproved, shared_from_this());
    if (office_.proved.erase(shared_from_this()) == 0) return;
    const std::optional<int> rank = office_.hub.ended(*this);
    if (!rank) return;
    const auto timer = std::make_shared<asio::steady_timer>(office_.io, kLauncherTime);
    timer->async_wait([&hub = office_.hub, rank, restart = office_.hub.restart(), timer](const asio::error_code&) {
      hub.not_explained(*rank, restart);
    });
  }

  static constexpr std::size_t kReadBytes = 16384;

  tcp::socket socket_;
  Office& office_;
  const std::string full_;
  asio::steady_timer limit_;  // for the proof
  const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  const std::string nonce_ = random_bytes();
  std::array<char, kGreetingBytes> greeting_;
  std::vector<char> bytes_;
  MessageReader reader_;
  std::string outgoing_;
  bool answering_ = false, last_ = false;
};

// The connection of a host that has gone without a word ends after half a minute.
void watch_peer(tcp::socket& socket) {
  const int fd = socket.native_handle(), on = 1, idle_seconds = 10, seconds_between = 5, times = 4;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof idle_seconds);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds_between, sizeof seconds_between);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
}

int open_spare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace

struct StoreServer::State {
  explicit State(const StoreServerOptions& options) : office(options.launched, options.secret) {}
  ~State() {
    if (spare >= 0) close(spare);
  }

  // Waits first: without file descriptors accepting fails also when nobody has come.
  void accept() {
    acceptor.async_wait(tcp::acceptor::wait_read, [this](const asio::error_code& stopped) {
      if (stopped) return;
      tcp::socket socket(office.io);
      asio::error_code failed;
      acceptor.accept(socket, failed);
      if (!failed)
        begin(std::move(socket));
      else if (failed != asio::error::would_block && !make_room())
        return accept_later();
      if (office.unproved.size() < kMaxUnproved) return accept();
      retry.expires_at(office.unproved.front()->since() + kGraceTime);
      retry.async_wait([this](const asio::error_code& e) {
        if (!e) accept();
      });
    });
  }

  // Accepting has failed, most likely for want of file descriptors.
  bool make_room() {
    if (spare < 0) return false;
    if (office.unproved.empty())
      close(std::exchange(spare, -1));
    else
      end_oldest();
    return true;
  }

  // The client that has got the spare descriptor ends soon.
  void accept_later() {
    retry.expires_after(kRetryTime);
    retry.async_wait([this](const asio::error_code& stopped) {
      if (stopped) return;
      if (spare < 0) spare = open_spare();
      if (spare < 0 && !office.unproved.empty()) end_oldest();
      accept();
    });
  }

  void end_oldest() { std::shared_ptr(office.unproved.front())->give_up(); }

  void begin(tcp::socket socket) {
    fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
    watch_peer(socket);
    asio::error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    if (spare < 0) spare = open_spare();
    std::string full;
    if (spare < 0)
      full = "the process that holds the store has as many files open as it may; raise `ulimit -n` where it starts";
    else if (office.proved.size() >= kMaxConnections)
      full = fmt::format("the store has {} connections, and takes no more", kMaxConnections);
    if (office.unproved.size() >= kMaxUnproved) end_oldest();
    try {
      office.unproved.push_back(std::make_shared<Session>(std::move(socket), office, std::move(full)));
    } catch (const Error&) {  // no random numbers
      return;
    }
    std::shared_ptr(office.unproved.back())->start();
  }

  Office office;
  tcp::acceptor acceptor{office.io};
  asio::steady_timer retry{office.io};
  int spare = open_spare();  // given up to tell one more client that there are no file descriptors
  int port = 0;
  const pid_t process = getpid();
  std::thread thread;
};

StoreServer::StoreServer(const StoreServerOptions& options) {
  check(options.port >= 0 && options.port <= 65535, "store", "port {} is out of range: give 0 to 65535", options.port);
  try {
    state_ = std::make_unique<State>(options);
    tcp::resolver resolver(state_->office.io);
    const tcp::endpoint address = *resolver.resolve(options.host, std::to_string(options.port)).begin();
    state_->acceptor.open(address.protocol());
    fcntl(state_->acceptor.native_handle(), F_SETFD, FD_CLOEXEC);
    state_->acceptor.set_option(tcp::acceptor::reuse_address(true));
    state_->acceptor.bind(address);
    check(!options.secret.empty() || address.address().is_loopback(), "store",
          "a store that listens on {}, which other hosts may reach, needs the job's secret: make a file of mode 0600 "
          "with `(umask 077; openssl rand -hex 32 > FILE)`, give it to all hosts, and set {}=FILE on each",
          options.host, kSecretFileVariable);
    state_->acceptor.listen();
    state_->acceptor.non_blocking(true);
    state_->port = state_->acceptor.local_endpoint().port();
  } catch (const asio::system_error& e) {
    const char* remedy = "MASTER_ADDR must be an address of the host of rank 0, which holds the store";
    if (e.code() == asio::error::address_in_use)
      remedy = "another program uses the port, so choose another MASTER_PORT";
    if (e.code() == asio::error::no_descriptors) remedy = "raise `ulimit -n`";
    fail("store", "cannot listen on {}:{}: {}; {}", options.host, options.port, e.code().message(), remedy);
  }
}

// Where a rank was lost, left too early or did not come, the others may still ask who: they get an answer while they
// are there, for at most a second.
StoreServer::~StoreServer() {
  if (getpid() != state_->process) {  // a child that ends has neither the thread nor sockets of its own
    (void)state_.release();
    return;
  }
  asio::io_context& io = state_->office.io;
  for (int i = 0; i < 50 && state_->thread.joinable(); ++i) {
    const auto needed = std::make_shared<std::promise<bool>>();
    asio::post(io, [this, needed] { needed->set_value(state_->office.hub.others_may_ask()); });
    if (auto answer = needed->get_future();
        answer.wait_for(std::chrono::seconds(1)) != std::future_status::ready || !answer.get())
      break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  io.stop();
  if (state_->thread.joinable()) state_->thread.join();
}

void StoreServer::start() {
  state_->accept();
  state_->thread = std::thread([this] { state_->office.io.run(); });
}

void StoreServer::begin_restart(int restart) {
  asio::post(state_->office.io, [this, restart] { state_->office.hub.begin_restart(restart); });
}

int StoreServer::port() const { return state_->port; }

void StoreServer::report_end(int rank, const std::string& text) {
  asio::post(state_->office.io, [this, rank, text] { state_->office.hub.report_end(rank, text); });
}

}  // namespace tandem::parallel
