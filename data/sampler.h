// Samplers: the order in which an epoch visits the rows. A sampler is a pure function of its settings and the epoch.
#pragma once
#include <cstdint>
#include <vector>

namespace tandem::data {

/// The order in which an epoch visits the rows.
class Sampler {
 public:
  virtual ~Sampler() = default;
  /// Number of rows an epoch visits.
  virtual std::int64_t size() const = 0;
  /// The rows of an epoch in the order of visit: the same for the same epoch, whenever it is called.
  virtual std::vector<std::int64_t> order(std::int64_t epoch) const = 0;

  /// The rows of the current epoch.
  std::vector<std::int64_t> rows() const { return order(epoch_); }
  /// Which epoch comes next; a loader moves on by one whenever it starts an epoch. Throws Error when negative.
  void set_epoch(std::int64_t epoch);
  std::int64_t epoch() const { return epoch_; }

 private:
  std::int64_t epoch_ = 0;
};

/// 0, 1, ..., size - 1 in every epoch.
class SequentialSampler : public Sampler {
 public:
  /// Throws Error when size is negative.
  explicit SequentialSampler(std::int64_t size);
  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  std::int64_t size_;
};

/// A new random order of 0, 1, ..., size - 1 in every epoch. It depends on seed and epoch only, not on manual_seed.
class RandomSampler : public Sampler {
 public:
  /// Throws Error when size is negative.
  explicit RandomSampler(std::int64_t size, std::uint64_t seed = 0);
  std::int64_t size() const override { return size_; }
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  std::int64_t size_;
  std::uint64_t seed_;
};

/// What happens when the rows do not divide evenly among the replicas.
enum class DistributedMode {
  pad,    // rows from the start are repeated: equal parts, some rows count twice
  drop,   // the last rows are left out: equal parts, some rows are missing in each epoch
  exact,  // every row once: parts differ by at most one row, and so perhaps by one batch
};

/// Which part of the rows a rank gets, and in which order.
struct DistributedSamplerOptions {
  std::int64_t num_replicas = 1;
  std::int64_t rank = 0;
  bool shuffle = true;
  std::uint64_t seed = 0;
  DistributedMode mode = DistributedMode::pad;
};

/// The part of rank `rank` of the order that all replicas together visit: its elements rank, rank + num_replicas, ...
/// That order is RandomSampler's with the same seed, or the sequential one, so that the replicas' batches number b
/// together are batch b of one process with num_replicas times their size.
class DistributedSampler : public Sampler {
 public:
  /// Throws Error when size is negative or rank is not in [0, num_replicas).
  explicit DistributedSampler(std::int64_t size, DistributedSamplerOptions options = {});
  std::int64_t size() const override;
  std::vector<std::int64_t> order(std::int64_t epoch) const override;

 private:
  std::int64_t size_;
  DistributedSamplerOptions options_;
};

}  // namespace tandem::data
