// The file: kMagic, then records. Locks: byte kContents of the file stands for its contents, and byte
// kPresence + r, shared by the stores of rank r for as long as they are there, for that rank; both lie far behind the
// end.
#include <tandem/parallel/comm/file_store.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include <tandem/parallel/comm/clock.h>
#include <tandem/parallel/comm/file_records.h>
#include <tandem/parallel/comm/rendezvous.h>
#include <tandem/parallel/comm/store_errors.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/parallel/comm/store_silence.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kMagic = "tandem file store 1\n";
constexpr off_t kContents = off_t{1} << 40, kPresence = kContents + 1;
constexpr auto kPollTime = std::chrono::milliseconds(5);

std::string joined_key(int rank) { return fmt::format("joined/{}", rank); }

// Locks of open file descriptions belong to this store alone, not to the process, and end with it.
int lock_byte(int fd, off_t at, short type) {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = at;
  range.l_len = 1;
  int result = 0;
  do {
    result = fcntl(fd, F_OFD_SETLK, &range);
  } while (result != 0 && errno == EINTR);
  return result;
}

}  // namespace

struct FileStore::State {
  FileStoreOptions options;
  const int process = getpid();
  std::mutex mutex;
  int fd = -1;
  std::map<std::string, std::string, std::less<>> values;
  std::size_t bytes = 0;  // of keys and values
  off_t read_to = 0;      // records up to here are in `values`
  bool joined = false;

  ~State() {
    if (fd >= 0) close(fd);
  }

  [[noreturn]] void still_locked() const {
    throw SilentStore(-1, fmt::format("{}the store '{}' stays locked: another process that uses it is stopped or "
                                      "overloaded",
                                      who_am_i(), options.path));
  }

  // Steps under the lock are short: a lock that stays is that of a process that does not run.
  void lock_contents(Clock::time_point deadline) const {
    constexpr auto kLongestPause = std::chrono::microseconds(2000);
    for (auto pause = std::chrono::microseconds(20); lock_byte(fd, kContents, F_WRLCK) != 0;
         pause = std::min(2 * pause, kLongestPause)) {
      tandem::check(errno == EAGAIN || errno == EACCES, "store",
                    "'{}' cannot be locked: {}; give a path on a file system that has locks", options.path,
                    std::strerror(errno));
      if (Clock::now() > deadline) still_locked();
      std::this_thread::sleep_for(pause);
    }
  }

  static Clock::time_point after(double seconds) { return Clock::now() + clock_ticks(seconds); }

  // Calls body() under the file's lock, with `values` up to date.
  template <class Body>
  auto locked(const Body& body) {
    return locked(body, after(AnswerLimit::within(options.timeout_seconds)));
  }
  template <class Body>
  auto locked(const Body& body, Clock::time_point deadline) {
    check_process(process);
    std::unique_lock lock(mutex, std::defer_lock);
    while (!lock.try_lock()) {  // ThreadSanitizer does not see how a timed_mutex is locked
      if (Clock::now() >= deadline) still_locked();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    lock_contents(deadline);
    return while_locked(body);
  }
  // The same when the lock is held already; ends it.
  template <class Body>
  auto while_locked(const Body& body) {
    struct Unlock {
      int fd;
      ~Unlock() { lock_byte(fd, kContents, F_UNLCK); }
    } unlock{fd};
    refresh();
    return body();
  }

  // Whether any store of the rank is there; another than this one, if it is its own rank.
  bool present(int rank) const {
    if (lock_byte(fd, kPresence + rank, F_WRLCK) != 0) return true;
    lock_byte(fd, kPresence + rank, F_UNLCK);
    return false;
  }

  [[noreturn]] void damaged(off_t at) const {
    fail("store", "'{}' is damaged at byte {}, or is no store; remove it, or give another path", options.path, at);
  }

  std::string read_bytes(off_t from, std::size_t count) const {
    std::string data(count, '\0');
    std::size_t have = 0;
    while (have < count) {
      const ssize_t n = pread(fd, data.data() + have, count - have, from + static_cast<off_t>(have));
      if (n < 0 && errno == EINTR) continue;
      tandem::check(n >= 0, "store", "'{}' cannot be read: {}", options.path, std::strerror(errno));
      if (n == 0) break;
      have += static_cast<std::size_t>(n);
    }
    data.resize(have);
    return data;
  }

  std::optional<FileRecord> next_record(std::string_view bytes_left) const {
    try {
      return first_record(bytes_left);
    } catch (const Error&) {
      damaged(read_to);
    }
  }

  void refresh() {
    struct stat info {};
    const bool known = fstat(fd, &info) == 0;
    tandem::check(known, "store", "'{}' cannot be read: {}", options.path, std::strerror(errno));
    if (info.st_size < read_to)
      throw CommError(-1, fmt::format("{}the store '{}' was cut short by another program", who_am_i(), options.path));
    while (read_to < info.st_size) {
      const std::size_t left = static_cast<std::size_t>(info.st_size - read_to);
      if (read_to == 0) {
        if (left < kMagic.size() && kMagic.starts_with(read_bytes(0, left))) break;
        if (read_bytes(0, kMagic.size()) != kMagic) damaged(0);
        read_to = static_cast<off_t>(kMagic.size());
        continue;
      }
      const std::string block = read_bytes(read_to, std::min(left, kMaxRecordBytes));
      const off_t before = read_to;
      for (std::string_view rest = block; const auto record = next_record(rest);) {
        apply(record->kind, std::string(record->key), std::string(record->value), read_to);
        read_to += static_cast<off_t>(record->bytes());
        rest.remove_prefix(record->bytes());
      }
      if (read_to == before) break;
    }
    // What is left is the record of a writer that was killed while it wrote, since this process holds the lock.
    if (read_to < info.st_size) (void)!ftruncate(fd, read_to);
  }

  void apply(char kind, std::string key, std::string value, off_t at) {
    if (const auto old = values.find(key); old != values.end()) {
      bytes -= key.size() + old->second.size();
      values.erase(old);
    }
    if (kind == '-') return;
    bytes += key.size() + value.size();
    if (bytes > kMaxStoreBytes) damaged(at);
    values.emplace(std::move(key), std::move(value));
  }

  void append(char kind, std::string_view key, std::string_view value) {
    const auto old = values.find(key);
    const std::size_t before = old == values.end() ? 0 : key.size() + old->second.size();
    if (kind == '+') (void)check_room(bytes, before, key.size() + value.size());
    std::string record;
    if (read_to == 0) record += kMagic;
    append_record(record, {kind, key, value});
    std::size_t done = 0;
    while (done < record.size()) {
      const ssize_t n = pwrite(fd, record.data() + done, record.size() - done, read_to + static_cast<off_t>(done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        const int error = errno;
        (void)!ftruncate(fd, read_to);
        fail("store", "'{}' cannot be written: {}", options.path, std::strerror(error));
      }
      done += static_cast<std::size_t>(n);
    }
    read_to += static_cast<off_t>(record.size());
    apply(kind, std::string(key), std::string(value), read_to);
  }

  std::optional<std::string> find(std::string_view key) const {
    const auto found = values.find(key);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  }

  std::string who_am_i() const { return who(options.rank, options.world_size); }

  // Writes down who has ended without leaving; returns one who has, or of whom another rank says so.
  std::optional<int> find_lost() {
    std::optional<int> lost;
    for (int r = 0; r < options.world_size; ++r) {
      if (r == options.rank || !find(joined_key(r)) || present(r)) continue;
      if (!find(ended_key(r))) append('+', ended_key(r), "has ended");
      if (!lost) lost = r;
    }
    for (auto said = values.lower_bound(kEndedPrefix); !lost && said != values.end(); ++said) {
      if (!said->first.starts_with(kEndedPrefix)) break;
      if (said->second != kHasLeft) lost = std::atoi(said->first.c_str() + kEndedPrefix.size());
    }
    return lost;
  }

  // Leaves it locked, so that nobody removes it before this rank has joined.
  void open_file() {
    const auto deadline = after(options.timeout_seconds);
    for (;;) {
      fd = open(options.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
      tandem::check(fd >= 0, "store", "'{}' cannot be opened: {}", options.path, std::strerror(errno));
      struct stat mine {
      }, named{};
      lock_contents(deadline);
      // Between open and lock the last rank of an earlier group may have removed the file.
      if (fstat(fd, &mine) == 0 && stat(options.path.c_str(), &named) == 0 && mine.st_ino == named.st_ino) break;
      close(fd);
      fd = -1;
    }
  }

  // A process may join again while something still holds its former store.
  void join() {
    const int r = options.rank;
    const std::string self = fmt::format("{} {}", host_id(), getpid());
    const auto before = find(joined_key(r));
    if (before) {
      tandem::check(present(r), "store", "'{}' is left from an earlier run; remove it, or give another path",
                    options.path);
      tandem::check(before == self, "store",
                    "'{}': rank {} has joined already; give each process a rank of its own, and each job a file",
                    options.path, r);
    }
    for (int other = 0; other < options.world_size; ++other)
      tandem::check(!find(joined_key(other)) || present(other), "store",
                    "'{}' is left from an earlier run, in which rank {} was; remove it, or give another path",
                    options.path, other);
    const bool present_now = lock_byte(fd, kPresence + r, F_RDLCK) == 0;
    tandem::check(present_now, "store", "'{}' cannot be locked: {}", options.path, std::strerror(errno));
    if (find(ended_key(r))) append('-', ended_key(r), {});
    if (!before) append('+', joined_key(r), self);
    joined = true;
  }

  void leave() {
    lock_byte(fd, kPresence + options.rank, F_UNLCK);
    if (present(options.rank)) return;  // a later store of this process
    append('-', joined_key(options.rank), {});
    const auto next = values.lower_bound("joined/");
    if (next == values.end() || !next->first.starts_with("joined/"))
      unlink(options.path.c_str());
    else
      append('+', ended_key(options.rank), kHasLeft);
  }
};

FileStore::FileStore(const FileStoreOptions& options) : state_(std::make_unique<State>()) {
  tandem::check(!options.path.empty(), "store", "the path is empty; give one that all ranks reach");
  tandem::check(options.rank < options.world_size || options.rank == -1, "store", "rank {} is out of range of {} ranks",
                options.rank, options.world_size);
  state_->options = options;
  state_->options.timeout_seconds = usable_timeout("store", options.timeout_seconds);
  state_->open_file();
  state_->while_locked([&] {
    if (options.rank >= 0) state_->join();
  });
}

FileStore::~FileStore() {
  if (!state_->joined || getpid() != state_->process) return;  // a child that ends is not the rank
  try {
    constexpr double kGoodbyeSeconds = 1;  // at most
    const AnswerLimit limit(kGoodbyeSeconds);
    state_->locked([&] { state_->leave(); });
  } catch (...) {  // the file is gone or the disk is full; the lock ends all the same
  }
}

void FileStore::set(std::string_view key, std::string_view value) {
  check_sizes(key, value);
  state_->locked([&] { state_->append('+', key, value); });
}

std::string FileStore::get(std::string_view key, std::optional<double> timeout_seconds) {
  check_sizes(key, {});
  const double seconds =
      AnswerLimit::within(usable_timeout("store", timeout_seconds.value_or(this->timeout_seconds())));
  const auto deadline = State::after(seconds);
  for (;;) {
    std::optional<int> lost;
    std::string how;
    const auto value = state_->locked(
        [&] {
          auto found = state_->find(key);
          if (!found) lost = state_->find_lost();
          if (lost) how = state_->find(ended_key(*lost)).value_or("has ended");
          return found;
        },
        deadline);
    if (value) return *value;
    if (lost) throw lost_while_waiting(*this, *lost, how, key);
    if (Clock::now() >= deadline) throw keys_missing(*this, seconds, {std::string(key)});
    std::this_thread::sleep_for(kPollTime);
  }
}

bool FileStore::check(std::string_view key) {
  check_sizes(key, {});
  return state_->locked([&] {
    if (key.starts_with(kEndedPrefix)) state_->find_lost();
    return state_->find(key).has_value();
  });
}

std::int64_t FileStore::add(std::string_view key, std::int64_t amount) {
  check_sizes(key, {});
  return state_->locked([&] {
    const std::int64_t sum = add_to(key, state_->find(key).value_or(""), amount);
    state_->append('+', key, std::to_string(sum));
    return sum;
  });
}

std::string FileStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired) {
  check_sizes(key, expected);
  check_sizes(key, desired);
  return state_->locked([&]() -> std::string {
    const auto found = state_->find(key);
    if (found.value_or("") != expected) return found.value_or("");
    state_->append('+', key, desired);
    return std::string(desired);
  });
}

bool FileStore::remove(std::string_view key) {
  check_sizes(key, {});
  return state_->locked([&] {
    if (!state_->find(key)) return false;
    state_->append('-', key, {});
    return true;
  });
}

std::int64_t FileStore::num_keys(std::string_view prefix) {
  if (!prefix.empty()) check_sizes(prefix, {});
  return state_->locked([&] {
    return std::count_if(state_->values.begin(), state_->values.end(), [&](const auto& entry) {
      return entry.first.starts_with(prefix) && !entry.first.starts_with("joined/");
    });
  });
}

double FileStore::timeout_seconds() const { return state_->options.timeout_seconds; }
Store::Names FileStore::names() const {
  return {state_->who_am_i(), fmt::format("the store '{}'", state_->options.path)};
}

}  // namespace tandem::parallel
