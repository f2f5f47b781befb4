// The stores: what every one does, and what happens when a rank, the server or the file is not as it should be.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include <tandem/parallel/comm/file_store.h>
#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/store_handshake.h>
#include <tandem/parallel/comm/store_protocol.h>
#include <tandem/parallel/comm/store_server.h>
#include <tandem/parallel/comm/tcp_store.h>
#include <tandem/tests/support/test.h>

using namespace tandem;
using namespace tandem::parallel;
using namespace std::string_literals;

namespace {

struct Server {
  explicit Server(bool launched = false) : server({.launched = launched}) { server.start(); }
  std::unique_ptr<TCPStore> client(int rank = -1, double timeout = 20) const {
    return std::make_unique<TCPStore>(TCPStoreOptions{
        .port = server.port(), .rank = rank, .world_size = rank < 0 ? -1 : 3, .timeout_seconds = timeout});
  }
  StoreServer server;
};

struct File {
  File() : path(std::filesystem::temp_directory_path() / fmt::format("tandem_store_{}_{}", getpid(), ++count())) {
    std::filesystem::remove(path);
  }
  ~File() { std::filesystem::remove(path); }
  static int& count() {
    static int n = 0;
    return n;
  }
  std::unique_ptr<FileStore> client(int rank = -1, double timeout = 20) const {
    return std::make_unique<FileStore>(FileStoreOptions{
        .path = path.string(), .rank = rank, .world_size = rank < 0 ? -1 : 3, .timeout_seconds = timeout});
  }
  std::filesystem::path path;
};

void check_store(Store& a, Store& b) {
  CHECK(a.num_keys() == 0);
  CHECK_FALSE(a.check("k"));
  a.set("k", "v");
  CHECK(b.check("k"));
  CHECK(b.get("k") == "v");
  const std::string zeros = "a\0b\0"s, large(1 << 20, '\0');
  a.set(zeros, zeros);
  b.set("large", large);
  CHECK(b.get(zeros) == zeros);
  CHECK(a.get("large") == large);
  a.set("empty", "");
  CHECK(b.get("empty").empty());
  CHECK(a.num_keys() == 4);
  CHECK(a.remove(zeros));
  CHECK_FALSE(b.remove(zeros));
  CHECK(b.num_keys() == 3);

  CHECK(a.add("n", 5) == 5);
  CHECK(b.add("n", -7) == -2);
  CHECK(a.get("n") == "-2");
  CHECK_ERROR(a.add("k", 1), "the value of 'k' is not a number");
  a.set("n", "9223372036854775807");
  CHECK_ERROR(a.add("n", 1), "out of range");

  CHECK(a.compare_set("c", "x", "y").empty());
  CHECK_FALSE(a.check("c"));
  CHECK(a.compare_set("c", "", "first") == "first");
  CHECK(b.compare_set("c", "", "second") == "first");
  CHECK(b.compare_set("c", "first", "second") == "second");

  CHECK_ERROR(a.set("", "v"), "the key is empty");
  CHECK_ERROR(a.set(std::string(2000, 'k'), "v"), "has 2000 bytes; at most 1024");
  CHECK_ERROR(a.set("k", std::string((8 << 20) + 1, 'v')), "the value of 'k' has 8388609 bytes");
  CHECK(a.get("k") == "v");

  // A get waits until the key comes, also while others use the same store.
  std::string got;
  std::thread waiting([&] { got = a.get("late"); });
  for (int i = 0; i < 20; ++i) a.add("busy", 1);
  b.set("late", "now");
  waiting.join();
  CHECK(got == "now");
}

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

int raw_connection(int port) {
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

void send_all(int fd, std::string_view bytes) {
  CHECK(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
}

std::string receive(int fd, std::size_t count) {
  std::string bytes(count, '\0');
  const ssize_t n = recv(fd, bytes.data(), bytes.size(), MSG_WAITALL);
  bytes.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
  return bytes;
}

// A connection that has proved the secret.
int raw_client(int port, std::string_view secret = {}) {
  using namespace store_protocol;
  const int fd = raw_connection(port);
  const std::string nonce = receive(fd, kNonceBytes);
  const std::string greeting = make_greeting({.restart = 0, .token = process_token()}, secret, nonce);
  send_all(fd, greeting);
  CHECK(receive(fd, kProofBytes) == answer_to(greeting, secret, nonce));
  CHECK(receive(fd, encode(Reply{}).size()) == encode(Reply{}));
  return fd;
}

// Whether the server closes a connection that sends these bytes.
bool closed_after(int fd, std::string_view bytes) {
  send_all(fd, bytes);
  char answer = 0;
  ssize_t n = 0;
  while ((n = recv(fd, &answer, 1, 0)) > 0) {
  }
  const bool closed = n == 0 || errno == ECONNRESET;
  close(fd);
  return closed;
}

}  // namespace

TEST_CASE("TCPStore: what a store does") {
  const Server server;
  check_store(*server.client(0), *server.client(1));
}

TEST_CASE("FileStore: what a store does") {
  const File file;
  {
    const auto a = file.client(0), b = file.client(1);
    check_store(*a, *b);
  }
  CHECK_FALSE(std::filesystem::exists(file.path));  // the last one that leaves removes it
}

TEST_CASE("a key that does not come") {
  const Server server;
  CHECK_ERROR(server.client(1, 0.1)->get("x"),
              "rank 1 of 3: waited 0.1 s for the key 'x' in the store at 127.0.0.1:", "no rank has set it");
  const File file;
  CHECK_ERROR(file.client(1, 0.1)->get("x\n"), "rank 1 of 3: waited 0.1 s for the key 'x?' in the store '",
              file.path.c_str());
}

TEST_CASE("TCPStore: no server") {
  int port = 0;
  {
    const StoreServer gone;
    port = gone.port();
  }
  const std::string text = fmt::format("rank 1 of 2: waited 0.2 s for the store at 127.0.0.1:{}", port);
  CHECK_ERROR(TCPStore({.port = port, .rank = 1, .world_size = 2, .timeout_seconds = 0.2}), text.c_str(),
              "MASTER_PORT");
  CHECK_ERROR(TCPStore({.port = 0}), "port 0 is out of range");
  CHECK_ERROR(TCPStore({.port = 1, .timeout_seconds = 0}), "timeout_seconds is 0");
}

TEST_CASE("TCPStore: the server comes later, and goes") {
  std::optional<StoreServer> server(std::in_place);
  const int port = server->port();
  std::optional<TCPStore> client;
  std::thread connecting([&] { client.emplace(TCPStoreOptions{.port = port, .rank = 0, .world_size = 1}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  server->start();
  connecting.join();
  client->set("k", "v");
  server.reset();
  CHECK_ERROR(client->check("k"), "rank 0 of 1: the store at 127.0.0.1:", "is lost",
              "the launcher, which held it, has ended");
  CHECK_ERROR(client->get("k"), "is lost");
}

TEST_CASE("StoreServer: a port in use") {
  const StoreServer server;
  const std::string text = fmt::format("cannot listen on 127.0.0.1:{}", server.port());
  CHECK_ERROR(StoreServer({.port = server.port()}), text.c_str(), "MASTER_PORT");
  CHECK_ERROR(StoreServer({.port = 70000}), "port 70000 is out of range");
  CHECK_ERROR(StoreServer({.host = "no.such.host.invalid"}), "cannot listen on no.such.host.invalid");
}

TEST_CASE("TCPStore: a lost rank ends every wait") {
  for (const bool launched : {false, true}) {
    Server server(launched);
    const auto store = server.client(0);
    std::string text;
    int about = -1;
    std::thread waiting([&] {
      try {
        store->get("x");
      } catch (const CommError& e) {
        text = e.what();
        about = e.rank();
      }
    });
    in_dying_process([&] {
      const auto lost = server.client(2);
      lost->set("here", "1");
      raise(SIGKILL);
    });
    if (launched) server.server.report_end(2, "was killed by signal 9 (Killed)");
    waiting.join();
    CHECK(about == 2);
    CHECK(text == fmt::format("rank 0 of 3: rank 2 {} while this rank waited for the key 'x' in the store",
                              launched ? "was killed by signal 9 (Killed)" : "has ended"));
    CHECK_ERROR(store->get("y"), "rank 2 ");  // also those that come later
    CHECK(store->get("here") == "1");
    CHECK(store->get("ended/2") == (launched ? "was killed by signal 9 (Killed)" : "has ended"));
    (void)server.client(2);  // it is started again
    CHECK(store->get("ended/2") == "has left the job");
    CHECK_ERROR(server.client(0, 0.1)->get("y"), "no rank has set it");
  }
}

TEST_CASE("TCPStore: a rank that never came") {
  Server server(true);
  server.server.report_end(1, "ended with exit code 0");
  CHECK_ERROR(server.client(0)->get("x"), "rank 1 ended with exit code 0");
  const Server other;
  const auto a = other.client(0);
  other.client(2)->set("ended/1", "did not come");
  CHECK_ERROR(a->get("x"), "rank 0 of 3: rank 1 did not come while this rank waited for the key 'x'");
}

TEST_CASE("FileStore: a lost rank ends every wait") {
  const File file;
  const auto store = file.client(0);
  in_dying_process([&] {
    const auto lost = file.client(2);
    lost->set("here", "1");
    raise(SIGKILL);
  });
  CHECK_ERROR(store->get("x"), "rank 0 of 3: rank 2 has ended while this rank waited for the key 'x'");
  CHECK(store->check("ended/2"));
  CHECK(store->get("here") == "1");
}

TEST_CASE("FileStore: a file that an earlier run left") {
  const File file;
  in_dying_process([&] {
    const auto lost = file.client(2);
    raise(SIGKILL);
  });
  CHECK_ERROR(file.client(0), file.path.c_str(), "is left from an earlier run, in which rank 2 was; remove it");
  CHECK_ERROR(file.client(2), "is left from an earlier run; remove it");
  std::filesystem::remove(file.path);
  const auto store = file.client(2);
  in_dying_process([&] {
    if (test::contains(test::error_of([&] { (void)file.client(2); }), "rank 2 has joined already")) raise(SIGKILL);
  });
}

TEST_CASE("FileStore: leaving and joining again") {
  const File file;
  auto a = file.client(0), b = file.client(1);
  a->set("k", "v");
  a.reset();
  CHECK(b->get("ended/0") == "has left the job");
  a = file.client(0);
  CHECK_FALSE(b->check("ended/0"));
  CHECK(a->get("k") == "v");
  // Again, while something still holds the store of before.
  auto second = file.client(0);
  CHECK(second->get("k") == "v");
  a.reset();
  CHECK_FALSE(b->check("ended/0"));
  CHECK_ERROR(file.client(1, 0.1)->get("x"), "no rank has set it");
  second.reset();
  CHECK(b->get("ended/0") == "has left the job");
  b.reset();
  b = file.client(1);
  CHECK(b->num_keys() == 0);
}

TEST_CASE("FileStore: bytes that are no store") {
  const File file;
  const auto refuses = [&](const std::string& bytes, const char* part) {
    std::ofstream(file.path, std::ios::binary) << bytes;
    CHECK_ERROR(file.client(0), part, file.path.c_str());
  };
  const std::string magic = "tandem file store 1\n";
  refuses("something else entirely", "is damaged at byte 0");
  refuses(magic + "+\xff\xff\xff\xff\xff\xff\xff\xff" + "k", "is damaged at byte 20");
  refuses(magic + "*\1\0\0\0\1\0\0\0kv"s, "is damaged at byte 20");
  refuses(magic + "+\0\0\0\0\1\0\0\0v"s, "is damaged at byte 20");
  refuses(magic + "+\1\0\0\0\1\0\0\0kv?\0\0\0\0\0\0\0\0"s, "is damaged at byte 31");
  for (const std::string& tail : {"+"s, "+\1\0\0\0\1\0\0\0k"s, "+\1\0\0\0\0\0\x70\0"s}) {
    // A writer was killed within a record: what was whole is kept.
    std::ofstream(file.path, std::ios::binary) << magic + "+\1\0\0\0\1\0\0\0kv"s + tail;
    const auto store = file.client();
    CHECK(store->get("k") == "v");
    store->set("l", "w");
    CHECK(file.client()->get("l") == "w");
  }
  const auto store = file.client();
  std::filesystem::resize_file(file.path, 3);
  CHECK_ERROR(store->get("k"), "was cut short by another program");
  CHECK_ERROR(FileStore({.path = "/no/such/folder/file"}), "'/no/such/folder/file' cannot be opened");
  CHECK_ERROR(FileStore({.path = ""}), "the path is empty");
}

TEST_CASE("FileStore: a full disk") {
  const File file;
  const auto store = file.client();
  store->set("k", "v");
  in_dying_process([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit small{64, 64};
    setrlimit(RLIMIT_FSIZE, &small);
    const std::string text = test::error_of([&] { store->set("large", std::string(1000, 'x')); });
    if (test::contains(text, "cannot be written") && store->get("k") == "v") raise(SIGKILL);
  });
  CHECK_FALSE(store->check("large"));
}

TEST_CASE("StoreServer: garbage ends its own connection only") {
  const Server server;
  const auto store = server.client(0);
  using namespace store_protocol;
  const int port = server.server.port(), idle = raw_connection(port);
  send_all(idle, "tan");
  const std::string enough(kGreetingBytes, 'x');
  CHECK(closed_after(raw_connection(port), enough));
  CHECK(closed_after(raw_connection(port), "GET / HTTP/1.1\r\n\r\n" + enough));
  CHECK(closed_after(raw_connection(port), encode(Request{.command = Command::set, .key = "k"}) + enough));
  CHECK(closed_after(raw_client(port), "\xff\xff\xff\xff"s));
  CHECK(closed_after(raw_client(port), "\0\0\0\0"s));                                      // an empty message
  CHECK(closed_after(raw_client(port), "\1\0\0\0\x63"s));                                  // no such command
  CHECK(closed_after(raw_client(port), "\x0d\0\0\0\3\xff\xff\xff\x7f\0\0\0\0\0\0\0\0"s));  // a field beyond the message
  std::string longer = encode(Request{.command = Command::check, .key = "k"});
  ++longer[0];
  CHECK(closed_after(raw_client(port), longer + "x"));  // bytes after the fields
  // Messages sent without waiting for replies are answered one by one.
  const int eager = raw_client(port);
  send_all(eager, encode(Request{.command = Command::set, .key = "k", .value = "v"}) +
                      encode(Request{.command = Command::get, .key = "k"}));
  const std::string replies = encode(Reply{}) + encode(Reply{Status::ok, "v"});
  CHECK(receive(eager, replies.size()) == replies);
  close(eager);
  CHECK(store->get("k") == "v");
  close(idle);
}

TEST_CASE("the job's secret") {
  const std::string secret(32, 's'), other(32, 'o');
  StoreServer server({.secret = secret});
  server.start();
  const auto client = [&](const std::string& with) {
    return TCPStore({.port = server.port(), .rank = 1, .world_size = 2, .timeout_seconds = 20, .secret = with});
  };
  for (const std::string& wrong : {other, ""s, secret + "s"})
    CHECK_ERROR(client(wrong), "rank 1 of 2: the store at 127.0.0.1:", "did not accept this process's secret",
                "TANDEM_SECRET_FILE must name the same file on all hosts");
  client(secret).set("k", "v");
  CHECK(client(secret).get("k") == "v");
  CHECK_ERROR(StoreServer({.host = "0.0.0.0"}), "a store that listens on 0.0.0.0", "needs the job's secret",
              "openssl rand -hex 32", "TANDEM_SECRET_FILE");
  (void)StoreServer({.host = "0.0.0.0", .secret = secret});
}

TEST_CASE("StoreServer: the job starts again") {
  Server server(true);
  const auto client = [&](int rank, int restart) {
    return std::make_unique<TCPStore>(TCPStoreOptions{
        .port = server.server.port(), .rank = rank, .world_size = 2, .timeout_seconds = 20, .restart = restart});
  };
  const auto launcher = client(-1, -1), old = client(1, 0);
  old->set("k", "v");
  launcher->set("launcher/nodes", "2");
  std::string text;
  std::thread waiting([&] { text = test::error_of([&] { (void)old->get("x"); }); });
  old->get("k");  // opens a second connection if the first one waits
  server.server.report_end(0, "was killed by signal 9 (Killed)");
  waiting.join();
  CHECK(test::contains(text, "rank 0 was killed by signal 9"));
  std::thread waiting_again([&] { text = test::error_of([&] { (void)launcher->get("launcher/late"); }); });
  server.server.begin_restart(1);
  const char* stale = "rank 1 of 2: this rank belongs to start 0 of the job, which is at restart 1; it must end";
  CHECK_ERROR(old->check("k"), stale);
  CHECK_ERROR(client(0, 0),
              "rank 0 of 2: the store at 127.0.0.1:", "refuses this process: this rank belongs to start 0");
  const auto fresh = client(1, 1);
  CHECK_FALSE(fresh->check("k"));
  CHECK_FALSE(fresh->check("ended/0"));
  CHECK(fresh->get("launcher/nodes") == "2");
  CHECK(launcher->num_keys() == 1);
  fresh->set("launcher/late", "now");
  waiting_again.join();
  CHECK(text == "no error");
  // A get that waits when the job starts again.
  std::thread last([&] { text = test::error_of([&] { (void)fresh->get("never"); }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  server.server.begin_restart(2);
  last.join();
  CHECK(test::contains(text, "this rank belongs to start 1 of the job, which is at restart 2"));
}

TEST_CASE("StoreServer: a rank that is there already") {
  const Server server;
  const auto first = server.client(1);
  (void)server.client(1);  // the same process may join again
  in_dying_process([&] {
    const std::string text = test::error_of([&] { (void)server.client(1); });
    if (test::contains(text,
                       "refuses this process: rank 1 has joined already from another process (two jobs with one "
                       "MASTER_PORT?)"))
      raise(SIGKILL);
  });
  CHECK_FALSE(first->check("ended/1"));
  CHECK_ERROR(TCPStore({.port = server.server.port(), .rank = 3, .world_size = 3}),
              "rank 3 is out of range of 3 ranks");
}
