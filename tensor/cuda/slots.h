// What kernels of a graph read and the host changes from replay to replay: pieces of device memory, filled by one copy
// from page-locked memory before each launch.
#pragma once
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/cuda/graph_memory.h>
#include <tandem/tensor/cuda/runtime.h>

namespace tandem::cuda {

/// The slots of one graph.
class Slots {
 public:
  explicit Slots(int device) : memory_(device) {}
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  /// Called before each refresh; where one throws, nothing has happened yet.
  void add_check(UniqueFunction<void()> check) { checks_.push_back(std::move(check)); }
  /// A piece of device memory; null when there is none left. See cuda::slot for `refresh`.
  void* add(std::size_t bytes, UniqueFunction<void(void*)> refresh);
  /// After the last slot: makes the host's memory.
  void finish();
  /// Makes all checks, then fills the slots in the order of the stream, whose device is current. Waits where the host
  /// is several replays ahead.
  void refresh(cudaStream_t stream);

 private:
  static constexpr std::size_t kStages = 4;
  struct Slot {
    std::size_t offset = 0;  // in the pages together
    UniqueFunction<void(void*)> refresh;
  };
  struct Page {
    char* data = nullptr;
    std::size_t bytes = 0, used = 0, offset = 0;
  };
  GraphMemory memory_;  // apart from what the graph's tensors use, since it is filled before the first of them is made
  std::vector<UniqueFunction<void()>> checks_;
  std::vector<Slot> slots_;
  std::vector<Page> pages_;  // one, but for very many parameters
  std::size_t bytes_ = 0;    // of all pages
  // The host's side, several times: a replay must not write where the copy of an earlier one still reads.
  char* staged_ = nullptr;
  std::array<Event, kStages> copied_;
  std::size_t stage_ = 0;
};

}  // namespace tandem::cuda
