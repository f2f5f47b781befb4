// The stores: what every one does, and what happens when a rank, the server or the file is not as it should be.
#include <fcntl.h>
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>

#include <tandem/parallel/comm/file_store.h>
#include <tandem/parallel/comm/hash_store.h>
#include <tandem/parallel/comm/prefix_store.h>
#include <tandem/parallel/comm/process_group.h>
#include <tandem/parallel/comm/store_silence.h>
#include <tandem/tests/parallel/store_support.h>

using namespace tandem;
using namespace tandem::parallel;
using namespace tandem::test;
using namespace std::string_literals;

namespace {

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

// Two that see the same keys; and what must outlive them.
struct Stores {
  std::shared_ptr<void> keeper = nullptr;
  std::shared_ptr<Store> a, b;
};
struct Kind {
  const char* name;
  bool ranks;  // whether a store knows its rank
  Stores (*make)(double timeout);
};
std::vector<Kind> kinds() {
  return {{"TCPStore", true,
           [](double timeout) {
             auto server = std::make_shared<Server>();
             return Stores{server, server->client(0, timeout), server->client(1, timeout)};
           }},
          {"FileStore", true,
           [](double timeout) {
             auto file = std::make_shared<File>();
             return Stores{file, file->client(0, timeout), file->client(1, timeout)};
           }},
          {"HashStore", false, [](double timeout) {
             auto store = std::make_shared<HashStore>(timeout);
             return Stores{nullptr, store, store};
           }}};
}

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
  CHECK_ERROR(a.add("k", 1), "k' is not a number");
  a.set("n", "9223372036854775807");
  CHECK_ERROR(a.add("n", 1), "out of range");
  CHECK(b.num_keys("e") == 1);

  CHECK(a.compare_set("c", "x", "y").empty());
  CHECK_FALSE(a.check("c"));
  CHECK(a.compare_set("c", "", "first") == "first");
  CHECK(b.compare_set("c", "", "second") == "first");
  CHECK(b.compare_set("c", "first", "second") == "second");

  CHECK_ERROR(a.set("", "v"), "the key is empty");
  for (const std::string& bad : {""s, std::string(2000, 'k')}) {
    CHECK_ERROR(a.set(bad, "v"), "key");
    CHECK_ERROR(a.get(bad), "key");
    CHECK_ERROR(a.check(bad), "key");
    CHECK_ERROR(a.add(bad, 1), "key");
    CHECK_ERROR(a.compare_set(bad, "", "v"), "key");
    CHECK_ERROR(a.remove(bad), "key");
  }
  CHECK_ERROR(a.set(std::string(2000, 'k'), "v"), "bytes; at most 1024");
  CHECK_ERROR(a.num_keys(std::string(2000, 'k')), "bytes; at most 1024");
  CHECK_ERROR(a.compare_set("k", std::string((8 << 20) + 1, 'v'), "x"), "bytes; at most 8388608");
  CHECK_ERROR(a.set("k", std::string((8 << 20) + 1, 'v')), "k' has 8388609 bytes");
  CHECK(a.get("k") == "v");

  // A get waits until the key comes, also while others use the same store.
  std::string got;
  std::thread waiting([&] { got = a.get("late"); });
  for (int i = 0; i < 20; ++i) a.add("busy", 1);
  b.set("late", "now");
  waiting.join();
  CHECK(got == "now");
}

}  // namespace

TEST_CASE("what a store does") {
  for (const Kind& kind : kinds()) {
    INFO(kind.name);
    {
      Stores stores = kind.make(20);
      check_store(*stores.a, *stores.b);
    }
    Stores stores = kind.make(20);
    PrefixStore a(stores.a, "p/"), b(stores.b, "p/"), other(stores.b, "q/"), inner(stores.a, "p/p/");
    check_store(a, b);
    CHECK(other.num_keys() == 0);
    other.set("k", "of another");
    inner.set("k", "inner");
    CHECK(a.get("k") == "v");
    CHECK(stores.b->get("q/k") == "of another");
    CHECK(b.get("p/k") == "inner");
    CHECK(other.num_keys() == 1);
    CHECK(b.num_keys("p/") == 1);
  }
  CHECK_ERROR(PrefixStore(nullptr, "p/"), "there is no store to put the prefix 'p/' before its keys");
  CHECK_ERROR(PrefixStore(std::make_shared<HashStore>(), ""), "the key is empty");
  CHECK_ERROR(PrefixStore(std::make_shared<HashStore>(), "p").set("", "v"), "the key is empty");
}

TEST_CASE("a store is full") {
  for (const Kind& kind : kinds()) {
    INFO(kind.name);
    const Stores stores = kind.make(20);
    const std::string value(8 << 20, 'v');
    int set = 0;
    const std::string text = error_of([&] {
      for (; set < 40; ++set) stores.a->set(fmt::format("k{}", set), value);
    });
    CHECK(contains(text, "the store is full: 268435456 bytes are allowed; remove keys"));
    CHECK(set == 31);  // the keys count, too
    CHECK_FALSE(stores.a->check("k31"));
    CHECK_ERROR(stores.a->compare_set("another", "", value), "the store is full");
    stores.a->set("k0", value);  // in place of as much
    CHECK(stores.a->compare_set("k1", value, "short") == "short");
    stores.a->set("k31", value);
    CHECK_ERROR(stores.a->set("k1", value), "the store is full");
    CHECK(stores.a->get("k1") == "short");
    CHECK(stores.a->remove("k0"));
    stores.a->set("k1", value);
    CHECK(stores.a->add("n", 1) == 1);
  }
}

TEST_CASE("keys that do not come") {
  for (const Kind& kind : kinds()) {
    INFO(kind.name);
    const Stores stores = kind.make(0.1);
    Store& b = *stores.b;
    PrefixStore under(stores.b, "p/");
    const auto check = [&](const std::string& text, const std::string& begin, const std::string& end) {
      const std::string whole = (kind.ranks ? "rank 1 of 3: " : "") + begin + " in " + b.names().store + end;
      CHECK(text == whole);
    };
    const std::string it = "; no rank has set it";
    check(error_of([&] { b.get("x\n"); }), "waited 0.1 s for the key 'x?'", it);
    check(error_of([&] { b.get("x", 0.05); }), "waited 0.05 s for the key 'x'", it);
    check(error_of([&] { under.get("x", 0.05); }), "waited 0.05 s for the key 'p/x'", it);
    CHECK_ERROR(b.get("x", -1), "timeout_seconds is -1; it must be positive");
    b.set("here", "1");
    b.wait({"here"});
    b.wait({});
    check(error_of([&] {
            b.wait({"x", "here", "y"});
          }),
          "waited 0.1 s for the keys 'x' and 'y'", "; no rank has set them");
    check(error_of([&] { b.wait({"here", "z"}, 0.05); }), "waited 0.05 s for the key 'z'", it);
    check(error_of([&] { under.wait({"x"}, 0.05); }), "waited 0.05 s for the key 'x'", it);
    CHECK(b.timeout_seconds() == 0.1);
    CHECK(under.timeout_seconds() == 0.1);
    // Longer than the store's own time, and long enough.
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      stores.a->set("p/u", "1");
      stores.a->set("v", "2");
    });
    b.wait({"p/u", "v"}, 20);
    CHECK(under.get("u", 20) == "1");
    later.join();
  }
}

TEST_CASE("a rank that another says has ended") {
  for (const Kind& kind : kinds()) {
    INFO(kind.name);
    const Stores stores = kind.make(20);
    stores.a->set("ended/2", "did not come");
    const std::string text = (kind.ranks ? "rank 1 of 3: rank 2" : "rank 2") + " did not come while this rank waited"s;
    CHECK_ERROR(stores.b->get("x"), text.c_str(), " for the key 'x' in the store");
    CHECK_ERROR(stores.b->wait({"ended/2", "x"}), text.c_str());
    CHECK(stores.b->get("ended/2") == "did not come");
  }
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
    CHECK(text == fmt::format("rank 0 of 3: rank 2 {} while this rank waited for the key 'x' in the store at "
                              "127.0.0.1:{}",
                              launched ? "was killed by signal 9 (Killed)" : "has ended", server.server.port()));
    CHECK_ERROR(store->get("y"), "rank 2 ");  // also those that come later
    CHECK(store->get("here") == "1");
    CHECK(store->get("ended/2") == (launched ? "was killed by signal 9 (Killed)" : "has ended"));
    (void)server.client(2);  // it is started again
    CHECK(store->get("ended/2") == "has left the job");
    CHECK_ERROR(server.client(0, 0.1)->get("y"), "no rank has set it");
  }
}

TEST_CASE("StoreServer: while the holder ends, others may ask why a rank has left") {
  auto server = std::make_unique<Server>();
  auto asks = server->client(2);
  (void)server->client(1);  // leaves
  std::thread end([&] { server.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(asks->get("ended/1") == "has left the job");
  asks.reset();
  end.join();
}

TEST_CASE("StoreServer: while the holder ends, others may ask why a group is broken") {
  auto server = std::make_unique<Server>();
  auto asks = server->client(2);
  server->client(0)->set("group/0/lost", "1|");
  std::thread end([&] { server.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(asks->get("group/0/lost") == "1|");
  asks.reset();
  end.join();
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
  (void)file.client(0);
  CHECK_FALSE(std::filesystem::exists(file.path));  // the last one that leaves removes it
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
  file.client()->set("k", "v");
  in_dying_process([&] {
    const auto store = file.client();
    signal(SIGXFSZ, SIG_IGN);
    const rlimit small{64, 64};
    setrlimit(RLIMIT_FSIZE, &small);
    const std::string text = test::error_of([&] { store->set("large", std::string(1000, 'x')); });
    if (test::contains(text, "cannot be written") && store->get("k") == "v") raise(SIGKILL);
  });
  CHECK_FALSE(file.client()->check("large"));
}

TEST_CASE("a store whose holder is stopped: calls end, and name it") {
  {
    const ServerProcess process([] { alarm(60); });
    const int port = process.port();
    const auto client = [&](double timeout) {
      return std::make_unique<TCPStore>(
          TCPStoreOptions{.port = port, .rank = 1, .world_size = 2, .timeout_seconds = timeout, .holder = 0});
    };
    const auto patient = client(1000), brief = client(0.3);
    kill(process.pid(), SIGSTOP);
    int stopped = 0;
    REQUIRE(waitpid(process.pid(), &stopped, WUNTRACED) == process.pid());
    const std::string text = fmt::format(
        "rank 1 of 2: the store at 127.0.0.1:{} does not answer: rank 0, which holds it, is stopped or overloaded",
        port);
    const auto check_silent = [&](Store& store) {
      try {
        store.set("k", "v");
        FAIL("no error");
      } catch (const SilentStore& e) {
        CHECK(e.what() == text);
        CHECK(e.rank() == 0);
      }
    };
    check_silent(*brief);
    {
      const AnswerLimit limit(0.3);  // for all calls together
      const AnswerLimit longer(1000);
      for (int i = 0; i < 3; ++i) check_silent(*patient);
      CHECK_ERROR(patient->get("k"), "for the key 'k'");
    }
    CHECK(AnswerLimit::within(1000) == 1000);
  }

  const File file;
  const auto store = file.client(0, 0.3);
  const int fd = open(file.path.c_str(), O_RDWR | O_CLOEXEC);
  struct flock contents {};
  contents.l_type = F_WRLCK;
  contents.l_whence = SEEK_SET;
  contents.l_start = off_t{1} << 40;
  contents.l_len = 1;
  REQUIRE(fcntl(fd, F_OFD_SETLK, &contents) == 0);
  const std::string locked = " the store '" + file.path.string() + "' stays locked: another process that uses it is";
  CHECK_ERROR(store->set("k", "v"), "rank 0 of 3:", locked.c_str());
  CHECK_ERROR(store->get("k"), locked.c_str());
  CHECK_ERROR(file.client(1, 0.3), "rank 1 of 3:", locked.c_str());
  close(fd);
  store->set("k", "v");
}

TEST_CASE("a child that ends with its parent's store") {
  Server server;
  const auto store = server.client(1);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    alarm(20);
    std::destroy_at(&server);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  store->set("k", "v");
  CHECK(server.client(2)->get("k") == "v");
}

TEST_CASE("a fork of the process that made the store") {
  const Server server;
  const File file;
  auto tcp = server.client(1);
  auto in_file = file.client(1);
  in_dying_process([&] {
    for (Store* store : {static_cast<Store*>(tcp.get()), static_cast<Store*>(in_file.get())})
      if (!test::contains(test::error_of([&] { store->set("k", "v"); }), "this process was forked from process"))
        return;
    tcp.reset();  // neither says goodbye for its parent
    in_file.reset();
    raise(SIGKILL);
  });
  const auto other = file.client(2);
  const auto over_tcp = server.client(2);
  CHECK_FALSE(other->check("ended/1"));
  CHECK_FALSE(over_tcp->check("ended/1"));
  in_file->set("k", "v");
  tcp->set("k", "v");
  CHECK(other->get("k") == over_tcp->get("k"));
}
