// Who may use a store: the job's secret, the handshake, restarts, and what strangers can send.
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tests/parallel/store_support.h>

using namespace tandem;
using namespace tandem::parallel;
using namespace tandem::test;
using namespace std::string_literals;
using namespace tandem::parallel::store_protocol;

namespace {

// What the other side still sends; "reset" at the end when the connection was reset.
std::string rest_of(int fd) {
  std::string all;
  char bytes[256];
  ssize_t n = 0;
  while ((n = recv(fd, bytes, sizeof bytes, 0)) > 0) all.append(bytes, static_cast<std::size_t>(n));
  if (n < 0) all += errno == ECONNRESET ? "reset" : "nothing, and the connection stays";
  close(fd);
  return all;
}

// A server that answers its first connection with `nonce`, and then with what `answer` makes of the greeting.
template <class Answer>
std::string error_against(const std::string& nonce, const Answer& answer, double timeout = 20) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  REQUIRE(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(listen(listener, 10) == 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  std::thread server([&] {
    const int fd = accept(listener, nullptr, nullptr);
    send_all(fd, nonce);
    send_all(fd, answer(receive(fd, kGreetingBytes)));
    close(listener);
    shutdown(fd, SHUT_WR);
    (void)receive(fd, 1);
    close(fd);
  });
  std::string text = error_of([&] {
    TCPStore(
        {.port = ntohs(address.sin_port), .rank = 1, .world_size = 2, .timeout_seconds = timeout, .secret = "secret"});
  });
  server.join();
  return text;
}

// Sets variables of the environment, and unsets them at the end.
struct Environment {
  explicit Environment(std::initializer_list<std::pair<const char*, std::string>> variables) {
    for (const auto& [name, value] : variables) setenv(name, value.c_str(), 1);
  }
  ~Environment() {
    unsetenv(kSecretVariable);
    unsetenv(kSecretFileVariable);
  }
};

}  // namespace

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

TEST_CASE("the handshake") {
  const std::string secret(32, 's');
  StoreServer server({.secret = secret});
  server.start();
  const Identity me{.restart = 0, .token = process_token()};

  // A whole one, whose bytes are of no use a second time.
  int fd = raw_connection(server.port());
  const std::string nonce = receive(fd, kNonceBytes), greeting = make_greeting(me, secret, nonce);
  CHECK(greeting.size() == kGreetingBytes);
  send_all(fd, greeting);
  CHECK(receive(fd, kProofBytes) == answer_to(greeting, secret, nonce));
  fd = raw_connection(server.port());
  CHECK(receive(fd, kNonceBytes) != nonce);
  send_all(fd, greeting);
  CHECK(rest_of(fd).empty());

  // A greeting of which any byte is changed, or the last one is missing.
  for (std::size_t at = 0; at < kGreetingBytes; at += 5) {
    fd = raw_connection(server.port());
    std::string changed = make_greeting(me, secret, receive(fd, kNonceBytes));
    changed[at] = static_cast<char>(changed[at] ^ 1);
    send_all(fd, changed);
    CHECK(rest_of(fd).empty());
  }
  fd = raw_connection(server.port());
  const std::string whole = make_greeting(me, secret, receive(fd, kNonceBytes));
  send_all(fd, whole.substr(0, kGreetingBytes - 1));
  shutdown(fd, SHUT_WR);
  CHECK(rest_of(fd).empty());

  // What the proofs say is what was sent.
  const Identity who{.rank = 3, .world_size = 5, .restart = 2, .token = process_token()};
  const std::string bytes = make_greeting(who, secret, nonce);
  CHECK(make_greeting(who, secret, nonce) != bytes);
  const std::optional<Identity> read = read_greeting(bytes, secret, nonce);
  REQUIRE(read.has_value());
  CHECK(read->rank == 3);
  CHECK(read->world_size == 5);
  CHECK(read->restart == 2);
  CHECK(read->token == who.token);
  CHECK_FALSE(read_greeting(bytes, secret + "s", nonce));
  // Zeros at the end of a secret count.
  for (const std::string& shorter : {""s, secret})
    for (const std::size_t zeros : {1u, 32u, 64u})
      CHECK_FALSE(read_greeting(make_greeting(who, shorter, nonce), shorter + std::string(zeros, '\0'), nonce));
  CHECK_FALSE(read_greeting(bytes + "x", secret, nonce));
  CHECK(answer_to(bytes, secret, nonce) != bytes.substr(kGreetingBytes - kProofBytes));
}

TEST_CASE("who knows the secret and is not welcome") {
  const std::string secret(32, 's');
  StoreServer server({.secret = secret});
  server.start();
  const auto answer = [&](const Identity& who) {
    const int fd = raw_connection(server.port());
    send_all(fd, make_greeting(who, secret, receive(fd, kNonceBytes)));
    return rest_of(fd).substr(kProofBytes);
  };
  CHECK(contains(answer({.rank = 5, .world_size = 3, .restart = 0, .token = process_token()}),
                 "rank 5 is out of range: the world size is 3"));
  for (const int size : {-5, 0})
    CHECK(contains(answer({.rank = 0, .world_size = size, .restart = 0, .token = process_token()}),
                   fmt::format("the world size is {}; it must be at least 1", size)));
  CHECK(contains(answer({.rank = 1, .world_size = 3, .restart = 4, .token = process_token()}),
                 "this rank belongs to start 4 of the job, which is at restart 0; it must end"));
}

TEST_CASE("TCPStore: what answers is no store of this job") {
  const std::string nonce(kNonceBytes, 'n');
  const char* impostor = "does not know the job's secret: it is another program, or the store of another job";
  CHECK_ERROR(fail("", "{}", error_against(nonce, [](const std::string&) { return std::string(40, 'x'); })), impostor,
              "rank 1 of 2: what answers at 127.0.0.1:");
  // It sends the client's own proof back, or that of another secret.
  CHECK_ERROR(fail("", "{}", error_against(nonce, [](const std::string& g) { return g.substr(g.size() - 32); })),
              impostor);
  CHECK_ERROR(fail("", "{}", error_against(nonce, [&](const std::string& g) { return answer_to(g, "other", nonce); })),
              impostor);
  CHECK_ERROR(fail("", "{}",
                   error_against("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
                                 [](const std::string&) { return "Connection: close\r\n\r\n and more"; })),
              impostor);
  // It stops within its proof, and is gone: nobody knows what it was.
  CHECK_ERROR(fail("", "{}",
                   error_against(
                       nonce, [](const std::string&) { return "x"; }, 6)),
              "Connection refused");
}

TEST_CASE("StoreServer: strangers have 5 seconds, and are few at a time") {
  const Server server;
  const auto store = server.client(1);
  std::vector<int> strangers;
  for (const std::string& begin : {""s, "t"s, "GET / HTTP/1.1\r\n\r\n"s}) {
    strangers.push_back(raw_connection(server.server.port()));
    send_all(strangers.back(), begin);
  }
  // One that sends byte after byte.
  const int slow = raw_connection(server.server.port());
  CHECK(receive(slow, kNonceBytes).size() == kNonceBytes);
  bool open = true;
  for (int i = 0; i < 100 && open; ++i) {
    open = send(slow, "t", 1, MSG_NOSIGNAL) == 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  CHECK_FALSE(open);
  close(slow);
  for (const int fd : strangers) {
    CHECK(receive(fd, kNonceBytes).size() == kNonceBytes);
    CHECK(rest_of(fd) == "reset");
  }

  strangers.clear();
  for (std::size_t i = 0; i < kMaxUnproved + 20; ++i) strangers.push_back(raw_connection(server.server.port()));
  CHECK(server.client(2)->num_keys() == 0);
  for (std::size_t i = 0; i < strangers.size(); ++i) {
    if (i < 20)
      CHECK(contains(rest_of(strangers[i]), "reset"));
    else
      close(strangers[i]);
  }
  store->set("k", "v");
  CHECK_FALSE(store->check("ended/1"));
}

TEST_CASE("StoreServer: too few file descriptors") {
  // The server's process has some left, but not for many clients.
  const auto limit_files = [] {
    alarm(30);
    const int next = dup(0);
    close(next);
    const rlimit few{static_cast<rlim_t>(next) + 4, static_cast<rlim_t>(next) + 4};
    setrlimit(RLIMIT_NOFILE, &few);
  };
  {
    const ServerProcess process(limit_files);
    const int port = process.port();
    const auto client = [&] {
      return std::make_unique<TCPStore>(TCPStoreOptions{.port = port, .timeout_seconds = 10});
    };
    std::vector<std::unique_ptr<TCPStore>> clients;
    const int stranger = raw_connection(port);
    const std::string text = error_of([&] {
      for (int i = 0; i < 10; ++i) clients.push_back(client());
    });
    INFO(text);
    CHECK(contains(text,
                   "refuses this process: the process that holds the store has as many files open as it may; raise "
                   "`ulimit -n` where it starts"));
    REQUIRE(clients.size() >= 2);
    CHECK(contains(rest_of(stranger), "reset"));
    clients.front()->set("k", "v");
    CHECK(clients.back()->get("k") == "v");
    clients.pop_back();
    clients.pop_back();
    CHECK(client()->get("k") == "v");
  }

  const Server server;
  in_dying_process([&] {
    const rlimit none{3, 3};
    setrlimit(RLIMIT_NOFILE, &none);
    const std::string text = error_of([&] { (void)server.client(1); }), own = error_of([] { StoreServer(); });
    if (contains(own, "cannot listen on 127.0.0.1:0: Too many open files; raise `ulimit -n`") &&
        contains(text, "rank 1 of 3: this process cannot connect to the store at 127.0.0.1:") &&
        contains(text, "Too many open files; raise `ulimit -n`"))
      raise(SIGKILL);
  });
}

TEST_CASE("StoreServer: keys, values and messages that are too large") {
  const Server server;
  const int port = server.server.port();
  const std::string long_key(kMaxKeyBytes + 1, 'k');
  CHECK(closed_after(raw_client(port), encode(Request{.command = Command::set, .key = long_key})));
  CHECK(closed_after(raw_client(port), encode(Request{.command = Command::num_keys, .key = long_key})));
  CHECK(closed_after(raw_client(port), "\xff\xff\xff\x7f"s + long_key));
  const std::string value(kMaxValueBytes + 1, 'v');
  for (const Request& r : {Request{.command = Command::set, .key = "k", .value = value},
                           Request{.command = Command::compare_set, .key = "k", .expected = value}}) {
    const int fd = raw_client(port);
    const std::string bytes = encode(r);
    std::size_t sent = 0;  // until the server has had enough
    while (sent < bytes.size()) {
      const ssize_t n = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) break;
      sent += static_cast<std::size_t>(n);
    }
    CHECK_FALSE(contains(rest_of(fd), "stays"));
  }
  CHECK(server.client()->num_keys() == 0);
}

TEST_CASE("the secret that the environment tells") {
  CHECK(to_hex(proof("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");  // RFC 4231
  CHECK(random_bytes() != random_bytes());
  unsetenv(kSecretVariable);
  unsetenv(kSecretFileVariable);
  CHECK(secret_from_environment().empty());
  const std::string secret = random_bytes();
  {
    const Environment set{{kSecretVariable, std::string(64, '0')}};
    CHECK_ERROR(secret_from_environment(), "the secret of TANDEM_SECRET is one byte repeated");
  }
  for (const std::string& bad : {"5a"s, "no digits"s, to_hex(secret) + "5", "x" + to_hex(secret).substr(1)}) {
    const Environment set{{kSecretVariable, bad}};
    CHECK_ERROR(secret_from_environment(), "TANDEM_SECRET is no secret: it must be 64 or more hexadecimal digits");
  }
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("tandem_secret_{}", getpid());
  std::filesystem::create_directory(folder);
  const std::string path = folder / "secret";
  const auto file_of = [&](const std::string& text, mode_t mode) {
    std::filesystem::remove(path);
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
  };
  {
    const Environment set{{kSecretVariable, to_hex(secret)}, {kSecretFileVariable, "/no/such/file"}};
    CHECK(secret_from_environment() == secret);  // a launcher's word is the last
  }
  {
    const Environment set{{kSecretVariable, "5A" + to_hex(secret)}};
    CHECK(secret_from_environment() == "Z" + secret);
  }
  const Environment set{{kSecretFileVariable, path}};
  CHECK_ERROR(secret_from_environment(), "TANDEM_SECRET_FILE names '", path.c_str(), "cannot be opened: No such file");
  file_of(to_hex(secret) + "\n", 0600);
  CHECK(secret_from_environment() == to_hex(secret));
  file_of(to_hex(secret), 0400);
  CHECK(secret_from_environment() == to_hex(secret));
  for (const std::string& guessed : {std::string(32, '\0'), std::string(64, '0') + "\n"}) {
    file_of(guessed, 0600);
    CHECK_ERROR(secret_from_environment(), "the secret of TANDEM_SECRET_FILE is one byte repeated", "openssl rand");
  }
  for (const mode_t mode : {0640u, 0604u, 0620u, 0666u}) {
    file_of(to_hex(secret), mode);
    CHECK_ERROR(secret_from_environment(), "others than this user may read or write the secret in '", "chmod 600 ");
  }
  if (geteuid() == 0) {
    file_of(to_hex(secret), 0600);
    REQUIRE(chown(path.c_str(), 12345, 0) == 0);
    CHECK_ERROR(secret_from_environment(), "belongs to another user (12345)", "make a file of your own");
  }
  file_of(to_hex(secret).substr(0, 31) + "\r\n", 0600);
  CHECK_ERROR(secret_from_environment(),
              "has 31 bytes; it must have 32 to 4096; make one with: openssl rand -hex 32 > ");
  file_of(std::string(5000, 's'), 0600);
  CHECK_ERROR(secret_from_environment(), "has 5000 bytes; it must have 32 to 4096");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  CHECK_ERROR(secret_from_environment(), "which is no file that can be read");
  std::filesystem::remove(path);
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  CHECK_ERROR(secret_from_environment(), "which is no file that can be read");
  std::filesystem::remove_all(folder);
}
