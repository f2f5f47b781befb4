// What the tests of stores share: a server, children that die, and connections without a TCPStore.
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <memory>
#include <string>

#include <tandem/parallel/comm/store_handshake.h>
#include <tandem/parallel/comm/store_protocol.h>
#include <tandem/parallel/comm/store_server.h>
#include <tandem/parallel/comm/tcp_store.h>
#include <tandem/tests/support/test.h>

namespace tandem::test {

struct Server {
  explicit Server(bool launched = false) : server({.launched = launched}) { server.start(); }
  std::unique_ptr<parallel::TCPStore> client(int rank = -1, double timeout = 20) const {
    return std::make_unique<parallel::TCPStore>(parallel::TCPStoreOptions{
        .port = server.port(), .rank = rank, .world_size = rank < 0 ? -1 : 3, .timeout_seconds = timeout});
  }
  parallel::StoreServer server;
};

// A server in a child process, which ends with this. `prepare` is called there before it starts, and limits its life by
// an alarm.
class ServerProcess {
 public:
  template <class Prepare>
  explicit ServerProcess(const Prepare& prepare) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      parallel::StoreServer server;
      prepare();
      server.start();
      const int port = server.port();
      if (write(ends[1], &port, sizeof port) != sizeof port) _exit(1);
      pause();
    }
    REQUIRE(read(ends[0], &port_, sizeof port_) == sizeof port_);
    close(ends[0]);
    close(ends[1]);
  }
  ~ServerProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;
  pid_t pid() const { return pid_; }
  int port() const { return port_; }

 private:
  pid_t pid_ = -1;
  int port_ = 0;
};

// Runs `body` in a child process, which kills itself in it.
template <class Body>
void in_dying_process(const Body& body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(30);
    body();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
}

inline int raw_connection(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  REQUIRE(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  timeval limit{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  return fd;
}

inline void send_all(int fd, std::string_view bytes) {
  CHECK(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

inline std::string receive(int fd, std::size_t count) {
  std::string bytes(count, '\0');
  const ssize_t n = recv(fd, bytes.data(), bytes.size(), MSG_WAITALL);
  bytes.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return bytes;
}

// A connection that has proved the secret.
inline int raw_client(int port, std::string_view secret = {}) {
  using namespace parallel::store_protocol;
  const int fd = raw_connection(port);
  const std::string nonce = receive(fd, kNonceBytes);
  const std::string greeting = make_greeting({.restart = 0, .token = process_token()}, secret, nonce);
  send_all(fd, greeting);
  CHECK(receive(fd, kProofBytes) == answer_to(greeting, secret, nonce));
  CHECK(receive(fd, encode(Reply{}).size()) == encode(Reply{}));
  return fd;
}

// Whether the server closes a connection that sends these bytes.
inline bool closed_after(int fd, std::string_view bytes) {
  send_all(fd, bytes);
  char answer = 0;
  ssize_t n = 0;
  while ((n = recv(fd, &answer, 1, 0)) > 0) {
  }
  const bool closed = n == 0 || errno == ECONNRESET;
  close(fd);
  return closed;
}

}  // namespace tandem::test
