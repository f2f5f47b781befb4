// Datasets: what can be trained on, example by example or a batch at a time.
#pragma once
#include <array>
#include <atomic>
#include <concepts>
#include <cstdint>
#include <span>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/tensor.h>

namespace tandem::data {

namespace detail {
/// Calls get(row, example) for each row and stacks the examples into `batch`; throws Error when they do not fit.
void stack_rows(std::span<const int64_t> rows, FunctionRef<void(int64_t, std::span<Tensor>)> get,
                std::span<Tensor> batch);
/// Rows of each tensor as one batch.
void select_rows(std::span<const Tensor> tensors, std::span<const int64_t> rows, std::span<Tensor> batch);
/// Throws Error unless 0 <= row < size.
void check_row(std::string_view op, int64_t row, int64_t size);
/// The common first size; throws Error when there is none.
int64_t check_rows(std::span<Tensor> tensors);
/// Makes the calling thread leave stack_rows, by an exception, once `*stop` is set.
class StopScope {
 public:
  explicit StopScope(const std::atomic<bool>* stop);
  ~StopScope();
  StopScope(const StopScope&) = delete;
  StopScope& operator=(const StopScope&) = delete;

 private:
  const std::atomic<bool>* previous_;
};
}  // namespace detail

/// `size()` examples of N tensors each. A loader with worker threads calls get and get_batch from several threads at
/// the same time. Random numbers drawn inside them come, in a loader, from a stream that the loader's seed, the epoch
/// and the row define, so that an example is the same whichever thread, batch or rank makes it.
template <std::size_t N = 2>
class Dataset {
 public:
  static constexpr std::size_t arity = N;
  virtual ~Dataset() = default;
  /// Number of examples.
  virtual int64_t size() const = 0;
  /// Example i, 0 <= i < size(), without a batch dimension.
  virtual std::array<Tensor, N> get(int64_t i) const = 0;
  /// The examples of `rows` stacked, without gradient history: each tensor gains a first dimension of rows.size(). By
  /// default made with get; override it where whole batches are cheaper. Throws Error when the examples' shapes,
  /// types or devices differ, or for no rows at all.
  virtual std::array<Tensor, N> get_batch(std::span<const int64_t> rows) const {
    std::array<Tensor, N> batch;
    detail::stack_rows(
        rows,
        [this](int64_t row, std::span<Tensor> example) {
          std::array<Tensor, N> tensors = get(row);
          for (std::size_t k = 0; k < N; ++k) example[k] = std::move(tensors[k]);
        },
        batch);
    return batch;
  }
};

/// Rows of tensors whose first sizes agree: TensorDataset(inputs, labels). Shares the tensors' memory where they are
/// dense. Throws Error when the first sizes differ.
template <std::size_t N = 2>
class TensorDataset : public Dataset<N> {
 public:
  template <class... T>
  requires(sizeof...(T) == N && N > 0 &&
           (std::derived_from<T, Tensor> && ...)) explicit TensorDataset(const T&... tensors)
      : tensors_{tensors...}, size_(detail::check_rows(tensors_)) {}
  int64_t size() const override { return size_; }
  std::array<Tensor, N> get(int64_t i) const override {
    detail::check_row("TensorDataset", i, size_);
    std::array<Tensor, N> example;
    for (std::size_t k = 0; k < N; ++k) example[k] = tensors_[k].select(0, i);
    return example;
  }
  std::array<Tensor, N> get_batch(std::span<const int64_t> rows) const override {
    for (const int64_t row : rows) detail::check_row("TensorDataset", row, size_);
    std::array<Tensor, N> batch;
    detail::select_rows(tensors_, rows, batch);
    return batch;
  }

 private:
  std::array<Tensor, N> tensors_;
  int64_t size_;
};
template <std::derived_from<Tensor>... T>
TensorDataset(const T&...) -> TensorDataset<sizeof...(T)>;

}  // namespace tandem::data
