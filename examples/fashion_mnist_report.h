// What fashion_mnist tells the user: a progress line on a terminal, plain lines elsewhere, and a log of JSON lines.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

struct EpochResult {
  std::int64_t epoch = 0;  // counts from 1
  double train_loss = 0, test_loss = 0, test_accuracy = 0, samples_per_s = 0;
};

class Report {
 public:
  /// Writes nothing when `silent`. The log is added to when `append`, else replaced. Throws tandem::Error when it
  /// cannot be opened.
  Report(bool silent, const std::string& log_path, bool append);
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  void line(const std::string& text);
  void begin_epoch(std::int64_t epoch, std::int64_t epochs, std::int64_t first_batch, std::int64_t batches);
  /// After a step on `rows` rows.
  void step(std::int64_t batch, std::int64_t rows, double loss);
  /// Rows a second in this epoch so far.
  double samples_per_s() const;
  void end_epoch(const EpochResult& result);

 private:
  using Clock = std::chrono::steady_clock;
  bool silent_, terminal_;
  std::FILE* log_ = nullptr;
  std::string log_path_;
  std::int64_t epoch_ = 0, epochs_ = 0, first_batch_ = 0, batches_ = 0, rows_ = 0;
  Clock::time_point start_, shown_;
};
