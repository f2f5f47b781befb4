// Replicas: one module bound to several sets of data. The module object is called by one thread for each device; inside
// replica i, a parameter or buffer stands for replica i's tensor (ReplicaScope).
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include <tandem/nn/module.h>
#include <tandem/parallel/backward_end.h>
#include <tandem/parallel/phases.h>
#include <tandem/parallel/replica_reducer.h>

namespace tandem::parallel {

/// A module's parameters and buffers on several devices. Parameters share the module's memory where devices can, so
/// that a change of them is seen by all; else they are copied when the module's have changed. Buffers are copies, but
/// those of replica 0 are the module's own.
class Replicas final : public BackwardListener, public std::enable_shared_from_this<Replicas> {
 public:
  /// Replica i is on devices[i]; a device may have several, which run one after the other. Throws Error when a
  /// parameter or buffer is not on the first device, and for a module that contains a data-parallel wrapper.
  Replicas(std::shared_ptr<nn::Module> module, std::vector<Device> devices, std::shared_ptr<PhaseLog> log = nullptr,
           FixedSums fixed_sums = {});
  ~Replicas() override;
  nn::Module& module() const { return *module_; }
  /// Where each replica is.
  const std::vector<Device>& devices() const { return devices_; }
  PhaseLog& log() const { return *log_; }
  /// False once a parameter or buffer of the module has been given other memory: moved, converted, or set.
  bool current() const;
  /// Brings buffers, and which parameters require grad, up to the module's.
  void refresh();
  /// Error unless the parameters of each replica have the bits of the module's: names the first that does not, the
  /// replica and its device. Nothing to do where they share memory. `step` is said in the text.
  void check_alike(std::int64_t step) const;
  /// Calls body(i) as replica i, for the first `count` replicas: all devices at once, those of one device in order.
  /// Each draws from random stream i, with fixed sums kFirstPartStream + i. Records if the caller does. An exception of
  /// the first replica that failed is rethrown with the replica and its device.
  void run(std::size_t count, FunctionRef<void(std::size_t)> body) const;
  /// Passes a result of a replica on, so that a backward through it ends with the sums of the replicas' gradients in
  /// the module's parameters.
  Tensor listen(const Tensor& result);

  void begin() override;
  void end() override;
  void abandon() override;

 private:
  struct Entry {
    std::string name;
    Tensor master;
    bool is_parameter = false;
    std::vector<Tensor> replicas = {};
    std::shared_ptr<const ReplicaSet> set = {};
    std::shared_ptr<Storage> storage = {};     // the master's when it was bound
    std::uint32_t conversions = 0;             // the same
    std::vector<std::uint32_t> versions = {};  // of the replicas when they were alike, the master's first
    bool reduced = false;                      // a parameter that the reducer knows
  };
  void bind(Entry& entry);
  void restore(Entry& entry);
  void make_reducer();
  std::shared_ptr<ReplicaReducer> reducer();

  std::shared_ptr<nn::Module> module_;
  std::vector<Device> devices_;                        // by replica
  std::vector<Device> distinct_;                       // each once
  std::vector<std::vector<std::size_t>> replicas_of_;  // by distinct device
  std::vector<Entry> entries_;
  std::shared_ptr<ReplicaReducer> reducer_;
  std::shared_ptr<PhaseLog> log_;
  FixedSums fixed_sums_;
  std::mutex mutex_;  // of the entries and the reducer, which refresh changes
  PhaseTime backward_start_;
};

}  // namespace tandem::parallel
