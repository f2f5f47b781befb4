#include <tandem/parallel/launch/rank_output.h>

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fmt/format.h>

namespace tandem::parallel {
namespace {

constexpr std::size_t kLastLines = 10, kLastLineBytes = 1000;
constexpr std::size_t kMaxLineBytes = 64 << 10;  // longer lines are parted
constexpr int kReadsAtEnd = 256;                 // more than a pipe holds

bool readable(int fd) {
  pollfd wait{fd, POLLIN, 0};
  return poll(&wait, 1, 0) > 0;
}

}  // namespace

std::string make_log_folder(const std::string& folder, int restart, Terminal& terminal) {
  std::string path = restart == 0 ? folder : fmt::format("{}/restart-{}", folder, restart);
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error && std::filesystem::is_directory(path, error)) return path;
  terminal.fail(fmt::format("the folder '{}' for logs cannot be made: {}; the ranks' output goes to the terminal", path,
                            error.message()));
  return {};
}

RankOutput::RankOutput(int pipe, const RankOutputOptions& options, Terminal& terminal)
    : pipe_(pipe), options_(options), terminal_(terminal) {
  if (options.log.empty()) return;
  log_ = std::fopen(options.log.c_str(), "we");
  if (log_ == nullptr)
    terminal.fail(fmt::format("the log '{}' cannot be written: {}; the rank's output goes to the terminal", options.log,
                              std::strerror(errno)));
}

RankOutput::~RankOutput() {
  if (pipe_ >= 0) close(pipe_);
  if (log_ != nullptr) std::fclose(log_);
}

RankOutput::RankOutput(RankOutput&& other) noexcept
    : pipe_(std::exchange(other.pipe_, -1)),
      options_(std::move(other.options_)),
      terminal_(other.terminal_),
      log_(std::exchange(other.log_, nullptr)),
      line_(std::move(other.line_)),
      last_lines_(std::move(other.last_lines_)) {}

void RankOutput::write_line(std::string_view line) {
  last_lines_.emplace_back(line.substr(0, kLastLineBytes));
  if (last_lines_.size() > kLastLines) last_lines_.pop_front();
  if (log_ != nullptr) {
    std::fwrite(line.data(), 1, line.size(), log_);
    std::fputc('\n', log_);
  }
  if (log_ == nullptr || options_.tee) terminal_.write_line(options_.rank, line);
}

void RankOutput::take() {
  char buffer[4096];
  const ssize_t n = read(pipe_, buffer, sizeof buffer);
  const bool ended = n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN);
  if (n > 0) line_.append(buffer, static_cast<std::size_t>(n));
  std::size_t begin = 0;
  for (std::size_t end; (end = line_.find('\n', begin)) != std::string::npos; begin = end + 1)
    write_line(std::string_view(line_).substr(begin, end - begin));
  line_.erase(0, begin);
  if (line_.size() >= kMaxLineBytes) write_line(std::exchange(line_, {}));
  flush();
  if (ended) end();
}

void RankOutput::flush() {
  if (log_ != nullptr && (std::fflush(log_) != 0 || std::ferror(log_) != 0)) {
    terminal_.fail(fmt::format("the log '{}' cannot be written: {}; the rank's output goes to the terminal",
                               options_.log, std::strerror(errno)));
    std::fclose(std::exchange(log_, nullptr));
  }
  terminal_.flush();
}

void RankOutput::finish() {
  for (int i = 0; i < kReadsAtEnd && pipe_ >= 0 && readable(pipe_); ++i) take();
  if (pipe_ >= 0) end();
}

void RankOutput::end() {
  if (!line_.empty()) write_line(std::exchange(line_, {}));
  flush();
  close(std::exchange(pipe_, -1));
}

}  // namespace tandem::parallel
