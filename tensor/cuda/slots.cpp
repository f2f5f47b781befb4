#include <tandem/tensor/cuda/slots.h>

#include <algorithm>
#include <utility>

#include <tandem/tensor/cuda/pinned.h>

namespace tandem::cuda {
namespace {

constexpr std::size_t kPage = std::size_t{64} << 10, kSlotAlignment = 16;

}  // namespace

Slots::~Slots() {
  if (staged_ != nullptr) release_pinned(staged_);
  for (const Page& page : pages_) release_graph_memory(page.data, page.bytes);
}

void* Slots::add(std::size_t bytes, UniqueFunction<void(void*)> refresh) {
  const std::size_t size = (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  if (pages_.empty() || pages_.back().bytes - pages_.back().used < size) {
    Page page{.bytes = std::max(size, kPage), .offset = bytes_};
    page.data = static_cast<char*>(memory_.allocate(page.bytes));
    if (page.data == nullptr) return nullptr;
    bytes_ += page.bytes;
    pages_.push_back(page);
  }
  Page& page = pages_.back();
  const std::size_t at = std::exchange(page.used, page.used + size);
  slots_.push_back({page.offset + at, std::move(refresh)});
  return page.data + at;
}

void Slots::finish() {
  if (bytes_ > 0) staged_ = static_cast<char*>(allocate_pinned(kStages * bytes_));
}

void Slots::refresh(cudaStream_t stream) {
  for (const auto& check : checks_) check();
  if (slots_.empty()) return;
  Event& copied = copied_[stage_];
  copied.synchronize();
  char* const host = staged_ + stage_ * bytes_;
  for (const Slot& slot : slots_) slot.refresh(host + slot.offset);
  for (const Page& page : pages_)
    if (page.used > 0)
      check_status(cudaMemcpyAsync(page.data, host + page.offset, page.used, cudaMemcpyHostToDevice, stream), "Graph");
  copied.record(stream);
  stage_ = (stage_ + 1) % kStages;
}

}  // namespace tandem::cuda
