#include <tandem/parallel/comm/rendezvous.h>

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/file_store.h>
#include <tandem/parallel/comm/meeting_file.h>
#include <tandem/parallel/comm/secret.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/parallel/comm/store_server.h>
#include <tandem/parallel/comm/tcp_store.h>

namespace tandem::parallel {
namespace {

constexpr const char* kHowToStart =
    "start the program with `tandem-run -n N program`, call spawn, or set RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT";

template <class T>
T required(std::optional<T> value, const char* variable) {
  check(value.has_value(), kInit, "{} is not set; {}", variable, kHowToStart);
  return *value;
}

struct Address {
  std::string host = {};
  int port = 0;  // 0: rank 0 shall have one from the system
  std::string secret = {};
};

Address parse_address(std::string_view method) {
  const std::string_view rest = method.substr(std::string_view("tcp://").size());
  const std::size_t colon = rest.rfind(':');
  Address a{.host = std::string(rest.substr(0, colon)), .secret = secret_from_environment()};
  bool good = colon != std::string_view::npos && colon > 0;
  if (good) {
    const char* last = rest.data() + rest.size();
    const auto [end, error] = std::from_chars(rest.data() + colon + 1, last, a.port);
    good = error == std::errc() && end == last && a.port >= 1 && a.port <= 65535;
  }
  check(good, kInit, "init_method is '{}'; write it as tcp://host:port, with a port from 1 to 65535", method);
  return a;
}

// Which start of the job this is; torchrun has a name of its own for it.
int restart_count() {
  const std::optional<int> ours = number_from_environment(kRestartVariable);
  return ours ? *ours : number_from_environment("TORCHELASTIC_RESTART_COUNT").value_or(0);
}

// Rank 0 holds the store for as long as its process lives: the others may still need it when rank 0 has left, and a
// later joining finds it again. A port of 0 becomes that of the store.
std::shared_ptr<StoreServer> hold_store(Address& address) {
  static std::mutex mutex;
  static std::shared_ptr<StoreServer> held;
  static Address asked, given;
  const std::lock_guard lock(mutex);
  if (!held || asked.host != address.host || asked.port != address.port) {
    held.reset();
    if (address.port == 0) address.secret = random_bytes();
    auto next = std::make_shared<StoreServer>(
        StoreServerOptions{.host = address.host, .port = address.port, .secret = address.secret});
    next->begin_restart(restart_count());
    next->start();
    asked = given = address;
    given.port = next->port();
    held = std::move(next);
  }
  address = given;
  return held;
}

Address address_from_environment() {
  Address a{.host = required(text_from_environment("MASTER_ADDR"), "MASTER_ADDR"),
            .port = required(number_from_environment("MASTER_PORT"), "MASTER_PORT"),
            .secret = secret_from_environment()};
  check(a.port >= 1 && a.port <= 65535, kInit, "MASTER_PORT is {}; it must be 1 to 65535", a.port);
  return a;
}

// For ranks that mpirun or srun has started here without an address.
Address meet_on_this_host(Place& place, const std::string& job_id, double seconds) {
  Address a{.host = "127.0.0.1"};
  if (place.rank == 0) {
    place.server = hold_store(a);
    place.meeting = std::make_shared<MeetingFile>(job_id, Meeting{a.port, a.secret});
  } else {
    const Meeting meeting = read_meeting(job_id, place.rank, place.world_size, seconds);
    a.port = meeting.port;
    a.secret = meeting.secret;
  }
  return a;
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::optional<std::string> how_ended(Store& store, int rank) {
  try {
    if (store.check(ended_key(rank))) return store.get(ended_key(rank));
  } catch (const CommError&) {  // the store has gone
  }
  return std::nullopt;
}

// The value of a rank's key.
std::string value_of(const Place& place, const std::string& prefix, int rank, const InitOptions& options) {
  Store& store = *place.store;
  const auto key = [&](int r) { return fmt::format("{}rank/{}", prefix, r); };
  try {
    return store.get(key(rank), options.timeout_seconds);
  } catch (const CommError& e) {
    if (e.rank() >= 0) {
      const auto how = how_ended(store, e.rank());
      if (!how) throw;
      throw CommError(e.rank(),
                      fmt::format("{}rank {} {} while this rank waited in init_process_group for rank {}; see "
                                  "that {} processes were started, all with the same address, and stay",
                                  who(place.rank, place.world_size), e.rank(), *how, rank, place.world_size));
    }
  }
  std::vector<int> missing;
  try {
    for (int r = rank; r < place.world_size; ++r)
      if (!store.check(key(r))) missing.push_back(r);
    if (missing.empty()) return store.get(key(rank));
    // For the others: this rank may hold the store.
    store.set(ended_key(missing.front()), "did not come");
  } catch (const CommError&) {  // the rank that holds the store has given up at this moment, too
    if (missing.empty()) missing = {rank};
  }
  throw CommError(
      missing.front(),
      fmt::format("{}waited {} s in init_process_group for rank {}, which did not come; see that {} processes were "
                  "started, all with the same address; a longer wait is set by InitOptions::timeout_seconds",
                  who(place.rank, place.world_size), options.timeout_seconds, fmt::join(missing, " and "),
                  place.world_size));
}

std::string last_join_key(const Place& place) { return fmt::format("joins/{}/last", place.rank); }

}  // namespace

std::string host_id() {
  std::string id = first_line("/proc/sys/kernel/random/boot_id");
  for (const char* space : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    char text[64] = {};
    const ssize_t n = readlink(space, text, sizeof text - 1);
    id += " " + std::string(text, n > 0 ? static_cast<std::size_t>(n) : 0);
  }
  return id;
}

Place find_place(const InitOptions& options) {
  const std::string_view method = options.init_method;
  check(options.store == nullptr || method == "env://", kInit,
        "both a store and init_method '{}' are given; leave one out", method);
  if (t_thread_rank != nullptr)
    return {.rank = t_thread_rank->rank, .world_size = t_thread_rank->world_size, .store = t_thread_rank->store};
  if (options.backend == "mpi") check_mpi();
  const StartEnvironment start = start_environment();
  const auto setting = [](int option, const char* name, std::optional<Setting> found, const char* variable) {
    return option >= 0 ? Setting{option, name} : required(found, variable);
  };
  const Setting rank = setting(options.rank, "rank", start.rank, "RANK"),
                size = setting(options.world_size, "world_size", start.world_size, "WORLD_SIZE");
  check(size.value > 0, kInit, "{} is {}; it must be at least 1", size.variable, size.value);
  check(rank.value < size.value, kInit, "{} is {}, which is out of range: {} is {}", rank.variable, rank.value,
        size.variable, size.value);
  if (options.backend == "mpi" && start.started_rank && start.started_size)
    check(rank.value == start.started_rank->value && size.value == start.started_size->value, kInit,
          "{} is {} and {} is {}, but MPI has started this process as rank {} of {}; leave {} and {} out",
          rank.variable, rank.value, size.variable, size.value, start.started_rank->value, start.started_size->value,
          rank.variable, size.variable);
  Place place{.rank = rank.value, .world_size = size.value};
  if (options.store) {
    place.store = options.store;
    return place;
  }
  if (method.starts_with("file://")) {
    place.store = std::make_shared<FileStore>(FileStoreOptions{.path = std::string(method.substr(7)),
                                                               .rank = place.rank,
                                                               .world_size = place.world_size,
                                                               .timeout_seconds = options.timeout_seconds});
    return place;
  }
  Address address;
  bool launcher_holds = false;
  if (method.starts_with("tcp://")) {
    address = parse_address(method);
  } else {
    check(method == "env://", kInit, "init_method is '{}'; give \"env://\", \"tcp://host:port\" or \"file:///path\"",
          method);
    const bool is_given = std::getenv("MASTER_ADDR") != nullptr || std::getenv("MASTER_PORT") != nullptr;
    if (is_given || start.job_id.empty()) {
      address = address_from_environment();
      launcher_holds = text_from_environment(kLauncherStoreVariable) == "1";
    } else {
      check(start.one_host, kInit,
            "the job runs on several hosts, and MASTER_ADDR is not set; set, on all ranks, MASTER_ADDR to an address "
            "of rank 0's host, MASTER_PORT to a free port there, and TANDEM_SECRET_FILE to a file with a secret");
      address = meet_on_this_host(place, start.job_id, options.timeout_seconds);
    }
  }
  place.store_host = address.host;
  if (place.rank == 0 && !launcher_holds && !place.server) place.server = hold_store(address);
  place.store = std::make_shared<TCPStore>(TCPStoreOptions{.host = address.host,
                                                           .port = address.port,
                                                           .rank = place.rank,
                                                           .world_size = place.world_size,
                                                           .timeout_seconds = options.timeout_seconds,
                                                           .secret = address.secret,
                                                           .restart = restart_count(),
                                                           .holder = launcher_holds ? -1 : 0});
  return place;
}

Agreement agree(const Place& place, const InitOptions& options) {
  Store& store = *place.store;
  const std::int64_t time = store.add(fmt::format("joins/{}", place.rank), 1);
  const auto prefix_of = [](std::int64_t t) { return fmt::format("{}/", t); };
  check(time == 1 || (store.check(last_join_key(place)) && store.get(last_join_key(place)) == prefix_of(time - 1)),
        kInit,
        "rank {} has tried to join this job before, and has failed; a job cannot be joined after that: start all ranks "
        "again",
        place.rank);
  Agreement result{.prefix = prefix_of(time), .hosts = std::vector<int>(static_cast<std::size_t>(place.world_size))};
  if (t_thread_rank != nullptr) return result;  // spawn_threads has started all; there is nothing to compare
  const std::string host = host_id();
  const std::string terms = fmt::format("{} ranks and backend '{}'", place.world_size, options.backend);
  store.set(fmt::format("{}rank/{}", result.prefix, place.rank), terms + "\n" + host);
  std::map<std::string, int> first_on_host;
  for (int r = 0; r < place.world_size; ++r) {
    const std::string value = value_of(place, result.prefix, r, options);
    const std::size_t line = value.find('\n');
    const std::string theirs = value.substr(0, line);
    if (theirs != terms)
      throw CommError(r, fmt::format("{}the ranks disagree: this rank was told {}, rank {} was told {}",
                                     who(place.rank, place.world_size), terms, r, theirs));
    const std::string_view where = std::string_view(value).substr(std::min(line, value.size()));
    result.hosts[static_cast<std::size_t>(r)] = first_on_host.try_emplace(std::string(where), r).first->second;
  }
  return result;
}

void note_joined(const Place& place, const Agreement& agreement) {
  place.store->set(last_join_key(place), agreement.prefix);
}

}  // namespace tandem::parallel
