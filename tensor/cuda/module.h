// What libtandem and its module libtandem_cuda.so have in common: the table that the module fills.
#pragma once
#include <memory>
#include <string>

#include <tandem/tensor/backend.h>
#include <tandem/tensor/callable.h>
#include <tandem/tensor/cuda.h>

namespace tandem::cuda {

inline constexpr const char* kModule = "libtandem_cuda.so";
/// Names another file to take for the module.
inline constexpr const char* kModuleVariable = "TANDEM_CUDA_MODULE";
/// The name of the module's function, which changes when this table, Backend or what they hold change.
inline constexpr const char* kEntry = "tandem_cuda_module_1";

/// Work of one device that was captured; see cuda::Graph. While it is being captured its destructor ends that.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
  /// Whether the memory is one that the graph allocated.
  virtual bool holds(const void* data) const = 0;
  /// Ends the capture, on the thread that began it. Throws Error when there is nothing that could be replayed.
  virtual void finish() = 0;
  virtual void replay() = 0;
};

/// Where a thread's work on a device goes instead of the device's main stream; none by default.
struct ThreadStream {
  int device = -1;
  void* stream = nullptr;
};

/// What the module can do. Devices are given by their number.
struct Module {
  const Backend* backend;
  /// Number of usable devices; 0 with the reason.
  int (*device_count)(std::string& reason);
  DeviceProperties (*properties)(int device);
  MemoryStats (*memory_stats)(int device);
  void (*reset_peak_memory)(int device);
  void (*empty_cache)();
  /// Waits for all work given to the device.
  void (*synchronize)(int device);
  /// Page-locked host memory, from a cache.
  void* (*allocate_pinned)(std::size_t bytes);
  void (*release_pinned)(void* data);
  bool (*is_pinned)(const void* data);
  /// An event on the calling thread's stream of the device, that tells the time at which its work has come so far; null
  /// while the thread captures a graph.
  void* (*record_time)(int device);
  /// Seconds from one to another on the same device; waits for the later one.
  double (*seconds_between)(void* start, void* end);
  void (*release_time)(void* event);
  /// Whether products of float32 may use TF32.
  void (*set_allow_tf32)(bool allow);
  bool (*allow_tf32)();
  /// From now on the calling thread's work on the device is not run but captured.
  std::unique_ptr<CapturedGraph> (*begin_capture)(int device);
  /// `check_it` is called before each replay of the graph that the calling thread is capturing, and before the host
  /// counts anything for it; where it throws, the replay has no effect.
  void (*at_replay)(UniqueFunction<void()> check_it);
  // Streams and events are CUDA's own.
  /// Sets where the calling thread's work goes, and returns what it was.
  ThreadStream (*exchange_stream)(ThreadStream next);
  /// Of high priority.
  void* (*new_stream)(int device);
  void (*release_stream)(int device, void* stream);
  /// Whether the calling thread's stream records a graph.
  bool (*is_capturing)(int device);
  /// What the calling thread's stream has been given so far, until release_time.
  void* (*new_event)(int device);
  /// The calling thread's stream goes on after the event.
  void (*wait_event)(int device, void* event);
  bool (*event_done)(void* event);
  /// Called with the device after each time that the host has waited for it; may throw.
  void (*set_synchronize_hook)(void (*hook)(int device));
};
/// What the module calls of the library.
struct Host {
  const Backend* cpu;
  UniqueFunction<PhiloxKey()> (*repeat_draw)(const PhiloxKey& drawn, std::uint64_t blocks);
};
/// The module's function.
using Entry = const Module*(const Host& host);

/// The module, or null with the reason why it cannot be opened.
const Module* find_module(std::string& reason);
/// Number of devices, also in a forked process and after a fault, where none can be used. It asks the driver once.
int existing_devices();
/// The module; Error that says why there is none.
const Module& module(std::string_view op);

}  // namespace tandem::cuda
