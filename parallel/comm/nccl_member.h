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
  /// Connects all ranks, which have agreed to; CommError, and the member is broken, when one does not come.
  void connect(const Fingerprint& call);
  /// Gives a collective to the GPU, after what the calling thread's stream has been given. Null when it is broken.
  std::shared_ptr<Flight> launch(const Collective& c, const Fingerprint& call, const Work& host);
  /// The calling thread's stream goes on after the collective. Throws when the member is broken.
  void join(const std::shared_ptr<Flight>& flight);
  /// After all of them; nothing when the member is broken.
  void join_all();
  bool is_done(const Flight& flight);
  /// No collective can succeed any more. Of several errors the first one counts.
  void break_off(const std::exception_ptr& error);
  /// The same for calls to come, where this rank takes no part in one.
  void refuse(const std::string& message);

  /// Memory that NCCL reaches directly, on all ranks at once; null when it is short.
  void* allocate(std::size_t bytes);
  void share(void* memory, std::size_t bytes);
  void unshare(void* memory);
  void release(void* memory) const { table_.release(device().index(), memory); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  int size() const { return static_cast<int>(setup_.ranks.size()); }
  // Waits until what was begun has ended, while the lock is open.
  void settle(Lock& lock, const Fingerprint& call);
  // Waits until all that was launched is done, or the member broken, while the lock is open.
  void drain(Lock& lock) const;
  void check_broken() const {
    if (broken_) std::rethrow_exception(broken_);
  }
  void tell_others(const std::exception_ptr& error) const;
  bool busy() const { return link_ && !broken_ && (captured_ || !flights_.empty()); }
  void watch();
  void look(Lock& lock);
  // Explains what has gone wrong, while the lock is open, and breaks off.
  void give_up(Lock& lock, std::vector<int> peers, bool late, const std::string& text, const Fingerprint& call);
  // The next peer, of whom one is asked each time, when it is lost.
  int lost_peer(Lock& lock);
  std::exception_ptr stop(std::exception_ptr error);
  void finish();

  const GroupSetup setup_;
  const int rank_;
  const NcclTable& table_;
  const cuda::OwnStream stream_;
  // What graphs ask before they replay collectives that were captured: false once none can succeed.
  const std::shared_ptr<std::atomic<bool>> usable_ = std::make_shared<std::atomic<bool>>(true);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<NcclLink> link_;
  std::deque<std::shared_ptr<Flight>> flights_;
  std::exception_ptr broken_ = nullptr, refused_ = nullptr;
  bool connected_ = false, captured_ = false, ending_ = false;
  int asked_ = 0;                  // the peer whose end was looked for last
  const void* doubted_ = nullptr;  // what waited when a peer that has ended well was seen
  double doubted_since_ = 0;
  Fingerprint last_ = {};  // the last call
  std::thread watchdog_;
};

/// The module's function; Error that says why there is none.
const NcclTable& nccl_module();

}  // namespace tandem::parallel
