#include "fashion_mnist_report.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>

#include <tandem/tensor/error.h>

Report::Report(bool silent, const std::string& log_path, bool append)
    : silent_(silent), terminal_(isatty(STDOUT_FILENO) != 0), log_path_(log_path) {
  if (log_path.empty()) return;
  log_ = std::fopen(log_path.c_str(), append ? "a" : "w");
  tandem::check(log_ != nullptr, "fashion_mnist", "the log {} cannot be written: {}", log_path, std::strerror(errno));
}

Report::~Report() {
  if (log_ != nullptr) std::fclose(log_);
}

void Report::line(const std::string& text) {
  if (silent_) return;
  fmt::print("{}\n", text);
  std::fflush(stdout);
}

void Report::begin_epoch(std::int64_t epoch, std::int64_t epochs, std::int64_t first_batch, std::int64_t batches) {
  epoch_ = epoch;
  epochs_ = epochs;
  first_batch_ = first_batch;
  batches_ = batches;
  rows_ = 0;
  start_ = shown_ = Clock::now();
}

double Report::samples_per_s() const {
  const std::chrono::duration<double> seconds = Clock::now() - start_;
  return static_cast<double>(rows_) / std::max(seconds.count(), 1e-9);
}

void Report::step(std::int64_t batch, std::int64_t rows, double loss) {
  rows_ += rows;
  if (silent_) return;
  const auto now = Clock::now();
  if (terminal_ ? now - shown_ < std::chrono::milliseconds(100) : now - shown_ < std::chrono::seconds(5)) return;
  shown_ = now;
  const std::chrono::duration<double> spent = now - start_;
  const double left = spent.count() * static_cast<double>(batches_ - batch) / static_cast<double>(batch - first_batch_);
  fmt::print("{}epoch {}/{}  batch {:>5}/{}  loss {:.4f}  {:>7.0f} samples/s  {:.0f} s left{}", terminal_ ? "\r" : "",
             epoch_, epochs_, batch, batches_, loss, samples_per_s(), left, terminal_ ? "  " : "\n");
  std::fflush(stdout);
}

void Report::end_epoch(const EpochResult& r) {
  line(fmt::format("{}epoch {}/{}  train loss {:.4f}  test loss {:.4f}  accuracy {:.2f} %  {:.0f} samples/s{}",
                   terminal_ ? "\r" : "", r.epoch, epochs_, r.train_loss, r.test_loss, 100 * r.test_accuracy,
                   r.samples_per_s, terminal_ ? "          " : ""));
  if (log_ == nullptr) return;
  // JSON has no NaN and no infinity.
  auto number = [](double v) { return std::isfinite(v) ? fmt::format("{:.9g}", v) : std::string("null"); };
  const bool ok = std::fputs(fmt::format("{{\"event\":\"epoch\",\"epoch\":{},\"train_loss\":{},\"test_loss\":{},"
                                         "\"test_accuracy\":{},\"samples_per_s\":{:.1f}}}\n",
                                         r.epoch, number(r.train_loss), number(r.test_loss), number(r.test_accuracy),
                                         r.samples_per_s)
                                 .c_str(),
                             log_) >= 0 &&
                  std::fflush(log_) == 0;
  tandem::check(ok, "fashion_mnist", "the log {} cannot be written: {}", log_path_, std::strerror(errno));
}
