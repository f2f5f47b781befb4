// The orders that samplers give.
#include <tandem/data/sampler.h>

#include <numeric>
#include <utility>

#include <tandem/data/internal.h>
#include <tandem/tensor/error.h>
#include <tandem/tensor/random.h>

namespace tandem::data {
namespace {

std::vector<std::int64_t> sequence(std::int64_t size) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(size));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  return rows;
}

// Fisher-Yates with one 64-bit number a row; the remainder's bias is below size / 2^64.
std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> rows = sequence(size);
  const PhiloxKey key{seed, detail::kShuffleStreams + static_cast<std::uint64_t>(epoch), 0};
  for (std::size_t i = rows.size(); i > 1; --i) {
    const Philox4 numbers = philox(key, i);
    const std::uint64_t number = std::uint64_t{numbers.x[0]} << 32 | numbers.x[1];
    std::swap(rows[i - 1], rows[number % i]);
  }
  return rows;
}

std::int64_t check_size(std::string_view op, std::int64_t size) {
  check(size >= 0, op, "size {} is negative; give the number of rows", size);
  return size;
}

}  // namespace

void Sampler::set_epoch(std::int64_t epoch) {
  check(epoch >= 0, "set_epoch", "epoch {} is negative; count from 0", epoch);
  epoch_ = epoch;
}

SequentialSampler::SequentialSampler(std::int64_t size) : size_(check_size("SequentialSampler", size)) {}
std::vector<std::int64_t> SequentialSampler::order(std::int64_t) const { return sequence(size_); }

RandomSampler::RandomSampler(std::int64_t size, std::uint64_t seed)
    : size_(check_size("RandomSampler", size)), seed_(seed) {}
std::vector<std::int64_t> RandomSampler::order(std::int64_t epoch) const { return permutation(size_, seed_, epoch); }

DistributedSampler::DistributedSampler(std::int64_t size, DistributedSamplerOptions options)
    : size_(check_size("DistributedSampler", size)), options_(options) {
  check(options.num_replicas >= 1, "DistributedSampler", "num_replicas is {}; give 1 or more", options.num_replicas);
  check(options.rank >= 0 && options.rank < options.num_replicas, "DistributedSampler",
        "rank {} is out of range; with {} replicas give 0 to {}", options.rank, options.num_replicas,
        options.num_replicas - 1);
}

std::int64_t DistributedSampler::size() const {
  const std::int64_t whole = size_ / options_.num_replicas, rest = size_ % options_.num_replicas;
  switch (options_.mode) {
    case DistributedMode::pad:
      return whole + (rest > 0);
    case DistributedMode::drop:
      return whole;
    case DistributedMode::exact:
      return whole + (options_.rank < rest);
  }
  return 0;
}

std::vector<std::int64_t> DistributedSampler::order(std::int64_t epoch) const {
  const std::vector<std::int64_t> all = options_.shuffle ? permutation(size_, options_.seed, epoch) : sequence(size_);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(size()));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t at =
        i * static_cast<std::size_t>(options_.num_replicas) + static_cast<std::size_t>(options_.rank);
    rows[i] = all[at % all.size()];  // only padding passes the end
  }
  return rows;
}

}  // namespace tandem::data
