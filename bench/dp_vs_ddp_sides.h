// The sides that dp_vs_ddp compares: one device, DataParallel, DistributedDataParallel, each a training step of its
// own.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tandem/parallel/comm/process_group.h>

namespace bench {

/// How a step is computed.
enum class Mode { one, threads, dp, ddp };
const char* name(Mode mode);

/// Devices and threads of a mode: one thread a device or rank, except where threads are what is measured.
void enter(Mode mode, int devices);

/// What is trained.
struct Problem {
  int layers = 2;
  std::int64_t width = 512, batch_size = 64;
  bool adam = false;
  double bucket_mb = 25;         // of ddp
  std::int64_t check_every = 0;  // of ddp
};

/// What dp_vs_ddp was asked for.
struct Settings {
  std::vector<std::int64_t> batch_sizes{8, 64, 256, 512};
  std::vector<std::string> optimizers{"sgd"};
  std::vector<int> devices{2};
  std::vector<std::string> modes{"one", "dp", "ddp"};
  int layers = 2;
  std::int64_t width = 512;
  std::int64_t check_every = 0;
  int rounds = 21;
  double round_ms = 40;
  std::string backend, json_file, trace_file;

  bool has(Mode mode) const;
};

constexpr double kLearningRate = 1e-6;  // in the timing: weights that stay as they are for any number of steps

/// Where the time of a step goes, in microseconds. Phases that a mode does not have are left out.
using Phases = std::map<std::string, double>;

/// A model with its data and optimizer. In the mode ddp all ranks make one and call the same functions.
class Side {
 public:
  /// Fixed weights and data, the same for every mode. `devices` and threads are set already; `group` is that of ddp,
  /// by default all ranks.
  Side(Mode mode, const Problem& problem, int devices, double lr,
       std::shared_ptr<tandem::parallel::ProcessGroup> group = nullptr);
  ~Side();
  /// One step of training.
  void step();
  /// `count` steps, and the loss of the whole batch before each.
  std::vector<double> losses(int count);
  /// Medians over `count` steps.
  Phases phases(int count);
  /// The most memory that one device held for this side so far, in bytes.
  double peak_bytes() const;
  /// Bytes that one step copies to or from device 0, or that one rank sends.
  double moved_bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bench
