// Storage: one block of device memory, shared by a tensor and its views, with the version counter of its contents.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <tandem/tensor/device.h>

namespace tandem {

/// A block of device memory and the count of its changes.
class Storage {
 public:
  /// `bytes` of uninitialised memory from the device's caching allocator, 64-byte aligned.
  Storage(std::size_t bytes, Device device);
  /// Memory that belongs to `owner` (a shared-memory segment, a mapped file) and lives as long as it.
  Storage(void* data, std::size_t bytes, Device device, std::shared_ptr<void> owner);
  /// The memory of another storage as seen from another device that shares it: contents and versions are common.
  Storage(std::shared_ptr<Storage> base, Device device);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  /// Raised by every write, so that a backward can tell that a saved tensor has changed.
  std::uint32_t version() const { return version_->load(std::memory_order_relaxed); }
  void mark_changed() { version_->fetch_add(1, std::memory_order_relaxed); }
  /// Number of in-place writes that were recorded for backward. A view made before one has a stale gradient.
  std::uint32_t recorded_writes() const { return recorded_writes_.load(std::memory_order_relaxed); }
  void mark_recorded_write() { recorded_writes_.fetch_add(1, std::memory_order_relaxed); }

 private:
  void* data_;
  std::size_t bytes_;
  Device device_;
  std::atomic<std::uint32_t> own_version_{0}, recorded_writes_{0};
  std::atomic<std::uint32_t>* version_ = &own_version_;
  std::shared_ptr<void> owner_;
  bool owned_by_pool_;
};

/// Memory of a device held by the caching allocator, in bytes.
struct MemoryStats {
  std::size_t in_use = 0;    // handed out now
  std::size_t peak = 0;      // the most ever handed out since the last reset
  std::size_t reserved = 0;  // taken from the system: in use and cached
};
MemoryStats memory_stats(Device device = {});
void reset_peak_memory(Device device = {});
/// Returns cached blocks of every device to the system.
void empty_cache();

}  // namespace tandem
