// NcclMember: what this process does on its GPU in a group: the communicator, its stream, what is under way, and a
// watchdog that ends it all when another rank is lost.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/broken_devices.h>
#include <tandem/parallel/comm/nccl_module.h>
#include <tandem/parallel/comm/work.h>
#include <tandem/tensor/callable.h>
#include <tandem/tensor/cuda/streams.h>

namespace tandem::parallel {

/// A collective that was given to the GPU.
struct Flight {
  Fingerprint call = {};
  Work host = {};                    // its agreement
  std::vector<Tensor> tensors = {};  // kept until it is done
  cuda::Moment start = {}, end = {};
  double since = 0;       // when it was first seen to be at work, or able to; before that 0
  bool captured = false;  // recorded in a graph, not run: it cannot be asked
  bool joined = false;    // a stream waits for it
};

/// Note [Lost ranks on GPUs]: ranks agree on each collective through the host group, whose Work throws when one is
/// lost, late, or means something else; the communicator is then aborted, which ends its kernels, since they wait for a
/// rank that does not come. What is lost after that agreement is seen by the watchdog. It aborts the communicator too,
/// so that a host that waits for the device is set free; it finds the error at once, since each wait for the device
/// asks for it. From then on every collective of the group on a GPU throws what was found first.
class NcclMember {
 public:
  /// Opens the module. `setup` has a name of its own, other than the host group's.
  NcclMember(const GroupSetup& setup, Device device);
  ~NcclMember();
  /// Ends what is under way, or aborts it where it must end at once. Called once no more is launched.
  void leave();
  NcclMember(const NcclMember&) = delete;
  NcclMember& operator=(const NcclMember&) = delete;

  Device device() const { return stream_.device(); }
  bool connected() const { return connected_; }
  /// Connects all ranks, which have agreed to; CommError, and the member is aborted, when one does not come.
  void connect(const Fingerprint& call);
  /// Gives a collective to the GPU, after what the calling thread's stream has been given. Null where it is aborted or
  /// closed.
  std::shared_ptr<Flight> launch(const Collective& c, const Fingerprint& call, const Work& host);
  /// The calling thread's stream goes on after the collective. Throws when the member is aborted or closed.
  void join(const std::shared_ptr<Flight>& flight);
  /// After all of them; nothing when the member is aborted.
  void join_all();
  bool is_done(const Flight& flight);
  /// No collective can succeed any more: ends those under way, on all ranks. Of several errors the first one counts.
  /// `thrown`: whoever calls it throws the error.
  void abort(const std::exception_ptr& error, bool thrown);
  /// This rank takes no part in a collective: calls to come fail, and those under way go on.
  void close(const std::string& message);

  /// Memory that NCCL reaches directly, on all ranks at once; null when it is short.
  void* allocate(std::size_t bytes);
  void share(void* memory, std::size_t bytes);
  void unshare(void* memory);
  void release(void* memory) const { table_.release(device().index(), memory); }

 private:
  // What is below `mutex_` is read and written while it is held. A function that takes a Lock is called with it held;
  // one that takes it without const opens it meanwhile, to wait or to ask the store, so that others may have aborted or
  // launched when it returns.
  using Lock = std::unique_lock<std::mutex>;
  class Opened;
  struct Failure;

  int size() const { return static_cast<int>(setup_.ranks.size()); }
  std::vector<int> others() const;
  // Gives it to the stream, without the lock before and after; false where it is aborted or closed.
  bool give(const Collective& c, const Fingerprint& call);
  // Waits until what was begun has ended.
  void settle(Lock& lock, const Fingerprint& call);
  // Waits until all that was launched is done, or it is aborted.
  void drain(Lock& lock) const;
  void check_usable(const Lock&) const {
    if (aborted_) std::rethrow_exception(aborted_);
  }
  void tell_others(const std::exception_ptr& error) const;
  bool busy(const Lock&) const { return link_ && !aborted_ && (captured_ || !flights_.empty()); }
  void watch();
  void look(Lock& lock);
  // Explains what has gone wrong, and aborts.
  void give_up(Lock& lock, const std::vector<int>& peers, bool late, const std::string& text, const Fingerprint& call);
  // A peer that has ended, as far as the store tells; one that has ended well may have done its part.
  struct End {
    int peer = -1;
    bool well = false;
  };
  End end_of(int peer) const;
  // The next peer, of whom one is asked each time, where it has ended and something waits for it; else -1.
  int lost_peer(Lock& lock);
  bool is_waited_for(const Lock&, const void* before, const void* now);
  // Returns why it is aborted.
  std::exception_ptr abort_now(const Lock& lock, std::exception_ptr error);
  // Ends the communicator; what the calling thread's stream is given from now on comes after all that it has done.
  void abort_link(const Lock& lock);
  void finish();

  const GroupSetup setup_;
  const int rank_;
  const NcclTable& table_;
  const cuda::OwnStream stream_;
  const std::shared_ptr<Failure> failure_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<NcclLink> link_;
  std::deque<std::shared_ptr<Flight>> flights_;
  std::exception_ptr aborted_ = nullptr;  // why the communicator was aborted: every call throws it
  std::exception_ptr closed_ = nullptr;   // why nothing more is launched, while what was launched goes on
  std::atomic<bool> connected_ = false;   // which can be asked without the lock
  bool captured_ = false;                 // some collectives are in graphs, which run without being seen here
  bool in_capture_ = false;               // the last one is: the stream may still record
  bool ending_ = false;
  int asked_ = 0;                  // the peer whose end was looked for last
  Fingerprint last_ = {};          // the last call
  const void* doubted_ = nullptr;  // what waited when a peer that has ended well was seen
  double doubted_since_ = 0;
  cuda::Moment doubted_moment_ = {};  // what the device had been given by then, where graphs wait
  std::thread watchdog_;
};

/// The module's function; Error that says why there is none.
const NcclTable& nccl_module();

}  // namespace tandem::parallel
