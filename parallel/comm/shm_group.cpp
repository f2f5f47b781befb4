#include <tandem/parallel/comm/shm_group.h>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include <fmt/format.h>

#include <tandem/tensor/create.h>

namespace tandem::parallel {
namespace {

constexpr int kSpins = 4000;  // about 80 us; processes that share cores must not spin longer

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t old, int milliseconds) {
  const timespec limit{milliseconds / 1000, milliseconds % 1000 * 1'000'000L};
  syscall(SYS_futex, &word, FUTEX_WAIT, old, &limit, nullptr, 0);  // shared between processes: not the private kind
}
void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

template <class T>
void combine(ReduceOp op, std::int64_t n, const T* from, T* to) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::avg:
      for (std::int64_t i = 0; i < n; ++i) to[i] += from[i];
      return;
    case ReduceOp::product:
      for (std::int64_t i = 0; i < n; ++i) to[i] *= from[i];
      return;
    case ReduceOp::min:
      for (std::int64_t i = 0; i < n; ++i) to[i] = std::min(to[i], from[i]);
      return;
    case ReduceOp::max:
      for (std::int64_t i = 0; i < n; ++i) to[i] = std::max(to[i], from[i]);
      return;
  }
}

// Combines elements [first, first + n) of the slots lo .. hi-1 in a balanced binary tree.
template <class T, class Slot>
void combine_tree(ReduceOp op, const Slot& slot, int lo, int hi, std::int64_t first, std::int64_t n, T* out) {
  if (hi - lo == 1) {
    std::copy_n(reinterpret_cast<const T*>(slot(lo)) + first, n, out);
    return;
  }
  constexpr std::int64_t kBlock = 1024;
  T right[kBlock];
  const int middle = lo + (hi - lo + 1) / 2;
  for (std::int64_t i = 0; i < n; i += kBlock) {
    const std::int64_t m = std::min(kBlock, n - i);
    combine_tree(op, slot, lo, middle, first + i, m, out + i);
    combine_tree(op, slot, middle, hi, first + i, m, right);
    combine(op, m, right, out + i);
  }
}

template <class Body>
void dispatch(DType dtype, const Body& body) {
  if (dtype == float32) return body.template operator()<float>();
  if (dtype == float64) return body.template operator()<double>();
  if (dtype == int64) return body.template operator()<std::int64_t>();
  if (dtype == int32) return body.template operator()<std::int32_t>();
  fail("all_reduce", "cannot combine {} tensors; convert with .to(float32) first", dtype);
}

std::string describe_end(int status) {
  if (WIFSIGNALED(status)) return fmt::format("was killed by signal {}", WTERMSIG(status));
  return fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

}  // namespace

ShmGroup::ShmGroup(ShmHeader* segment, int number, std::vector<int> ranks, int world_rank, double timeout_seconds)
    : segment_(segment),
      barrier_(segment->barriers[number]),
      ranks_(std::move(ranks)),
      timeout_seconds_(timeout_seconds) {
  const auto found = std::find(ranks_.begin(), ranks_.end(), world_rank);
  if (found != ranks_.end()) rank_ = static_cast<int>(found - ranks_.begin());
}

char* ShmGroup::slot(int member) const {
  const std::size_t data = shm_bytes(0);
  return reinterpret_cast<char*>(segment_) + data +
         static_cast<std::size_t>(ranks_[static_cast<std::size_t>(member)]) * kShmSlotBytes;
}

// Waits for all members; a dead or silent one becomes an exception that names it.
void ShmGroup::meet(const char* what) {
  const std::uint32_t generation = barrier_.generation.load(std::memory_order_acquire);
  const std::uint32_t visit = barrier_.visits[rank_].fetch_add(1, std::memory_order_relaxed) + 1;
  if (barrier_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == ranks_.size()) {
    barrier_.arrived.store(0, std::memory_order_relaxed);
    barrier_.generation.fetch_add(1, std::memory_order_release);
    futex_wake_all(barrier_.generation);
    return;
  }
  for (int i = 0; i < kSpins; ++i) {
    if (barrier_.generation.load(std::memory_order_acquire) != generation) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const auto start = std::chrono::steady_clock::now();
  while (barrier_.generation.load(std::memory_order_acquire) == generation) {
    futex_wait(barrier_.generation, generation, 50);
    if (barrier_.generation.load(std::memory_order_acquire) != generation) return;  // met, and then the peer ended
    if (const int dead = segment_->dead_rank.load();
        dead >= 0 && std::find(ranks_.begin(), ranks_.end(), dead) != ranks_.end())
      throw CommError(dead, fmt::format("rank {} of {}: rank {} {} while this rank waited in {}", rank_, size(), dead,
                                        describe_end(segment_->dead_status), what));
    if (std::chrono::steady_clock::now() - start < std::chrono::duration<double>(timeout_seconds_)) continue;
    std::vector<int> missing;
    for (int i = 0; i < size(); ++i)
      if (barrier_.visits[i].load(std::memory_order_relaxed) != visit) missing.push_back(i);
    throw CommError(
        missing.empty() ? -1 : missing.front(),
        fmt::format("rank {} of {}: waited {} s in {} for rank {}, which is stopped, slow, or in another part "
                    "of the program; a longer wait is set by InitOptions::timeout_seconds",
                    rank_, size(), timeout_seconds_, what, fmt::join(missing, " and ")));
  }
}

// All members say what they are about to do; a difference is an error on each of them, before data moves.
void ShmGroup::agree(const Collective& collective) {
  const Fingerprint mine = fingerprint(collective, sequence_++);
  Fingerprint(&all)[kMaxShmRanks] = barrier_.fingerprints[mine.sequence % 2];
  all[rank_] = mine;
  meet(name(collective.operation));
  for (int i = 0; i < size(); ++i) {
    const Fingerprint& other = all[i];
    if (other == mine) continue;
    throw CommError(
        i, fmt::format("rank {} of {}: the ranks disagree: rank {} calls {}, rank {} calls {}; every rank must "
                       "call the same operations in the same order, on tensors of one size and type",
                       rank_, size(), rank_, describe(mine), i, describe(other)));
  }
}

Work ShmGroup::start(const Collective& c) {
  agree(c);
  Tensor t = c.input.defined() ? c.input : c.output;
  if (c.operation == Operation::all_reduce) all_reduce(t, c.op);
  if (c.operation == Operation::broadcast) broadcast(t, c.root);
  return {};
}

void ShmGroup::all_reduce(Tensor& t, ReduceOp op) {
  dispatch(t.dtype(), [&]<class T>() {
    constexpr auto kPiece = static_cast<std::int64_t>(kShmSlotBytes / sizeof(T));
    auto* data = static_cast<T*>(t.raw_for_write().data);
    const std::int64_t count = t.numel();
    for (std::int64_t at = 0; at < count; at += kPiece) {
      const std::int64_t n = std::min(kPiece, count - at);
      std::copy_n(data + at, n, reinterpret_cast<T*>(slot(rank_)));
      meet("all_reduce");
      // Each rank combines its share, and writes it to every rank's slot.
      const std::int64_t first = n * rank_ / size(), last = n * (rank_ + 1) / size();
      T block[1024];
      for (std::int64_t i = first; i < last; i += 1024) {
        const std::int64_t m = std::min<std::int64_t>(1024, last - i);
        combine_tree<T>(
            op, [&](int r) { return slot(r); }, 0, size(), i, m, block);
        if (op == ReduceOp::avg)
          for (std::int64_t k = 0; k < m; ++k) block[k] = static_cast<T>(block[k] / static_cast<T>(size()));
        for (int r = 0; r < size(); ++r) std::copy_n(block, m, reinterpret_cast<T*>(slot(r)) + i);
      }
      meet("all_reduce");
      std::copy_n(reinterpret_cast<const T*>(slot(rank_)), n, data + at);
    }
  });
}

void ShmGroup::broadcast(Tensor& t, int root) {
  auto* data = static_cast<char*>(t.raw_for_write().data);
  const std::size_t bytes = static_cast<std::size_t>(t.numel()) * size_of(t.dtype());
  for (std::size_t at = 0; at < bytes; at += kShmSlotBytes) {
    const std::size_t n = std::min(kShmSlotBytes, bytes - at);
    if (rank_ == root) std::memcpy(slot(root), data + at, n);
    meet("broadcast");
    if (rank_ != root) std::memcpy(data + at, slot(root), n);
    meet("broadcast");
  }
}

}  // namespace tandem::parallel
