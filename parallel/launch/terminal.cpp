#include <tandem/parallel/launch/terminal.h>

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

namespace tandem::parallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kFullBytes = 1 << 20;
constexpr auto kOrderTime = std::chrono::milliseconds(100);  // for which one stream waits for the other
constexpr auto kLastTime = std::chrono::seconds(3);

}  // namespace

// A descriptor and the thread that writes it. The thread holds the stream too, since it cannot be ended while it
// writes.
class Terminal::Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(int fd) : fd_(fd) {}

  void put(std::string_view text) {
    const std::lock_guard lock(mutex_);
    if (error_ != 0 || text.empty()) return;
    pending_ += text;
    changed_.notify_all();
    if (std::exchange(started_, true)) return;
    try {
      std::thread([self = shared_from_this()] { self->run(); }).detach();
    } catch (const std::system_error& e) {
      give_up(e.code().value());
    }
  }

  std::size_t waiting() const {
    const std::lock_guard lock(mutex_);
    return pending_.size() + writing_;
  }

  int error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

  bool wait(Clock::time_point limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, limit, [this] { return pending_.empty() && writing_ == 0; });
  }

  // Waits a moment; not again until the reader has come back.
  void wait_for_order() {
    std::unique_lock lock(mutex_);
    if (!stuck_) stuck_ = !changed_.wait_for(lock, kOrderTime, [this] { return pending_.empty() && writing_ == 0; });
  }

  void end() {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ending_ || !pending_.empty(); });
      if (pending_.empty()) return;
      const std::string text = std::exchange(pending_, {});
      writing_ = text.size();
      lock.unlock();
      const int error = write_all(text);
      lock.lock();
      writing_ = 0;
      stuck_ = false;
      if (error != 0) give_up(error);
      changed_.notify_all();
    }
  }

  int write_all(std::string_view text) const {
    while (!text.empty()) {
      const ssize_t n = write(fd_, text.data(), text.size());
      if (n >= 0) {
        text.remove_prefix(static_cast<std::size_t>(n));
      } else if (errno == EAGAIN) {  // whoever shares the descriptor has made it so
        pollfd wait{fd_, POLLOUT, 0};
        poll(&wait, 1, -1);
      } else if (errno != EINTR) {
        return errno;
      }
    }
    return 0;
  }

  void give_up(int error) {
    error_ = error;
    pending_.clear();
  }

  const int fd_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string pending_;
  std::size_t writing_ = 0;  // bytes
  int error_ = 0;
  bool started_ = false, stuck_ = false, ending_ = false;
};

Terminal::Terminal()
    : output_(std::make_shared<Stream>(STDOUT_FILENO)), errors_(std::make_shared<Stream>(STDERR_FILENO)) {}

Terminal::~Terminal() {
  flush();
  const auto limit = Clock::now() + kLastTime;
  for (Stream* s : {output_.get(), errors_.get()}) {
    s->wait(limit);
    s->end();
  }
}

void Terminal::write_line(int rank, std::string_view line) { lines_ += fmt::format("[{}] {}\n", rank, line); }

void Terminal::flush() {
  output_->put(std::exchange(lines_, {}));
  look();
}

void Terminal::say(std::string_view text) {
  output_->put(std::exchange(lines_, {}));
  output_->wait_for_order();
  errors_->put(fmt::format("tandem: {}\n", text));
  errors_->wait_for_order();
}

void Terminal::fail(std::string_view text) {
  failed_ = true;
  say(text);
}

void Terminal::look() {
  const int error = output_->error();
  if (error == 0 || std::exchange(said_, true)) return;
  fail(fmt::format("the ranks' output cannot be written: {}", std::strerror(error)));
}

bool Terminal::full() const { return output_->waiting() >= kFullBytes; }

bool Terminal::drain(int milliseconds) {
  const auto limit = Clock::now() + std::chrono::milliseconds(milliseconds);
  flush();
  output_->wait(limit);
  look();
  return errors_->wait(limit) && output_->waiting() == 0;
}

}  // namespace tandem::parallel
