// The backend nccl: tensors on GPUs go by NCCL, in a module that is opened when the first one comes; all else, and the
// agreement on what the ranks call, goes through a group of the hosts.
#include <unistd.h>

#include <list>

#include <fmt/format.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/comm/nccl_member.h>
#include <tandem/parallel/comm/start_environment.h>
#include <tandem/parallel/comm/then.h>
#include <tandem/parallel/own_part.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/open_module.h>

namespace tandem::parallel {
namespace {

using MemberPtr = std::shared_ptr<NcclMember>;

void keep_for_ever(MemberPtr member) { (void)new MemberPtr(std::move(member)); }

// A collective on GPUs. See Note [Lost ranks on GPUs].
class GpuWork final : public Work::State {
 public:
  /// Without a flight the member is aborted or closed.
  GpuWork(MemberPtr member, Work host, std::shared_ptr<Flight> flight)
      : member_(std::move(member)), host_(std::move(host)), flight_(std::move(flight)) {}
  bool poll() override {
    if (ended_) return true;
    if (!agreed_) {
      if (!host_.is_completed()) return false;
      if (host_.exception() != nullptr) return true;
      agreed_ = true;
    }
    return !flight_ || member_->is_done(*flight_);
  }
  void wait() override {
    if (!ended_) {
      try {
        end();
      } catch (...) {
        error_ = std::current_exception();
      }
      ended_ = true;
    }
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void end() {
    try {
      host_.wait();
    } catch (...) {
      member_->abort(std::current_exception(), true);
      throw;
    }
    member_->join(flight_);
    flight_ = nullptr;
  }

  const MemberPtr member_;
  const Work host_;
  std::shared_ptr<Flight> flight_;
  std::exception_ptr error_;
  bool agreed_ = false, ended_ = false;
};

// A collective of the hosts in a group that has works on GPUs, too. An error that ranks learn by it ends what the group
// does there, since ranks that did not mean the same are out of step.
class HostWork final : public Work::State {
 public:
  HostWork(MemberPtr member, Work host, bool fails)
      : member_(std::move(member)), host_(std::move(host)), fails_(fails) {}
  bool poll() override { return host_.is_completed(); }
  void wait() override {
    try {
      host_.wait();
    } catch (const CommError&) {
      member_->abort(std::current_exception(), true);
      throw;
    }
    if (!fails_) member_->join_all();
  }

 private:
  const MemberPtr member_;
  const Work host_;
  const bool fails_;
};

// Memory of NCCL on this rank.
struct Block {
  Block(const NcclMember& member, void* memory) : device(member.device()), data(memory) {}
  ~Block() {
    if (!process_ends()) nccl_module().release(device.index(), data);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  const Device device;
  void* const data;
};

class NcclGroup final : public ProcessGroup {
 public:
  NcclGroup(const GroupSetup& setup, std::shared_ptr<ProcessGroup> host) : setup_(setup), host_(std::move(host)) {
    setup_.name += "/nccl";
  }
  ~NcclGroup() override {
    if (!member_) return;
    if (getpid() == process_)
      member_->leave();
    else  // a child that ends has neither the thread nor the device
      keep_for_ever(std::move(member_));
  }
  std::string backend() const override { return "nccl"; }
  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  bool serves(Device device) const override { return device.is_cuda() || host_->serves(device); }
  Tensor allocate(const Shape& shape, DType dtype, Device device) override;

 protected:
  Work start(const Collective& c) override;

 private:
  Work start_on_gpu(const Collective& c, Device device);
  Work start_message(const Collective& c);
  Work start_on_host(const Collective& c);
  // Where a process has no other ranks to talk to, nothing needs NCCL.
  Work copy_alone(const Collective& c);
  Work announce(const Collective& c, Fingerprint& call);
  void check_process(const char* op) const;
  void make_member(const char* op, Device device);
  void end_messages();
  std::vector<std::vector<std::int64_t>> exchange(const std::vector<std::int64_t>& mine);

  GroupSetup setup_;
  const std::shared_ptr<ProcessGroup> host_;
  const pid_t process_ = getpid();
  MemberPtr member_;  // once there is a tensor on a GPU
  std::vector<std::shared_ptr<Block>> blocks_;
  std::list<Work> messages_;  // that bring something to a GPU
};

Work NcclGroup::start(const Collective& c) {
  end_messages();
  const Tensor& any = c.input.defined() ? c.input : c.output;
  if (!any.defined() || any.device().is_cpu()) return start_on_host(c);
  check_process(name(c.operation));
  if (is_message(c.operation)) return start_message(c);
  if (size() == 1) return copy_alone(c);
  return start_on_gpu(c, any.device());
}

Work NcclGroup::start_on_host(const Collective& c) {
  const bool fails = c.operation == Operation::fail;
  Work host = start_in(*host_, c);
  if (!member_ || !member_->connected() || is_message(c.operation)) return host;
  if (fails) member_->close(c.message);
  return Work(std::make_shared<HostWork>(member_, std::move(host), fails));
}

Work NcclGroup::announce(const Collective& c, Fingerprint& call) {
  call = fingerprint(c, call_count() + host_->call_count() + 1);
  call.on_gpu = 1;
  return start_in(*host_, {.operation = c.operation, .announced = std::make_shared<const Fingerprint>(call)});
}

Work NcclGroup::copy_alone(const Collective& c) {
  Fingerprint call;
  Work host = announce(c, call);
  const NoGradGuard no_grad;
  Tensor output = c.output;
  if (output.defined() && c.input.defined() && output.identity() != c.input.identity())
    output.copy_(c.input.view(output.shape()));
  else if (output.defined())
    output.mark_changed();
  return host;
}

// Before anything is sent in the name of the rank.
void NcclGroup::check_process(const char* op) const {
  check(
      getpid() == process_, op,
      "this process was forked from process {}, which is the member of the group and works on its GPU; it can take no "
      "part",
      process_);
}

void NcclGroup::make_member(const char* op, Device device) {
  if (!member_) member_ = std::make_shared<NcclMember>(setup_, device);
  check(member_->device() == device, op,
        "the tensor is on {}, but the group has worked on {}; a process works on one device in a group", device,
        member_->device());
}

Work NcclGroup::start_on_gpu(const Collective& c, Device device) {
  try {
    make_member(name(c.operation), device);
  } catch (const Error& e) {  // the others would wait for this rank
    return Work::failing(start_on_host({.operation = Operation::fail, .message = e.what()}), std::current_exception());
  }
  Fingerprint call;
  Work host = announce(c, call);
  std::shared_ptr<Flight> flight;
  try {
    if (!member_->connected()) {
      try {
        host.wait();  // all ranks connect then, or none does
      } catch (const CommError&) {
        return host;
      }
      member_->connect(call);
    }
    flight = member_->launch(c, call, host);
  } catch (const CommError&) {  // which the member has kept, for the Work
  } catch (const Error& e) {
    const auto error = std::make_exception_ptr(CommError(
        rank(), fmt::format("rank {} of {}: {} cannot be started: {}", rank(), size(), describe(call), e.what())));
    member_->abort(error, false);  // thrown by the Work
  }
  return Work(std::make_shared<GpuWork>(member_, std::move(host), std::move(flight)));
}

// NCCL runs what is on a stream in order: of two ranks that both send first, none would come to its recv. So messages
// go through the hosts.
Work NcclGroup::start_message(const Collective& c) {
  const NoGradGuard no_grad;
  Collective staged = c;
  if (c.operation == Operation::send) {
    staged.input = c.input.to(Device());
    return start_in(*host_, staged);
  }
  staged.output = empty(c.output.shape(), {.dtype = c.output.dtype()});
  messages_.push_back(then(start_in(*host_, staged), [to = c.output, from = staged.output]() mutable {
    const NoGradGuard no_grad_either;
    to.copy_(from);
  }));
  return messages_.back();
}

// Those whose Work was dropped, too.
void NcclGroup::end_messages() {
  for (auto it = messages_.begin(); it != messages_.end();) {
    if (it->is_completed()) {
      (void)it->exception();  // whoever waits for it gets it
      it = messages_.erase(it);
    } else {
      ++it;
    }
  }
}

std::vector<std::vector<std::int64_t>> NcclGroup::exchange(const std::vector<std::int64_t>& mine) {
  Tensor all = empty({size(), static_cast<std::int64_t>(mine.size())}, {.dtype = int64});
  Work work = host_->all_gather(all, tensor(mine));
  if (member_->connected()) work = Work(std::make_shared<HostWork>(member_, std::move(work), false));
  work.wait();
  std::vector<std::vector<std::int64_t>> lines;
  for (int r = 0; r < size(); ++r) lines.push_back(all[r].to_vector<std::int64_t>());
  return lines;
}

Tensor NcclGroup::allocate(const Shape& shape, DType dtype, Device device) {
  if (device.is_cpu()) return host_->allocate(shape, dtype, device);
  check_process("allocate");
  check(rank() >= 0, "allocate", "this process is not a member of the group; only its members may call it");
  if (size() == 1) return zeros(shape, {.dtype = dtype, .device = device});
  do_own_part(*this, [&] { make_member("allocate", device); });
  const auto bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
  std::vector<std::int64_t> mine{static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(dtype)};
  const std::size_t columns = mine.size();
  for (const auto& block : blocks_) mine.push_back(block.use_count() > 1);
  const auto wishes = exchange(mine);
  for (int r = 1; r < size(); ++r) {
    const auto& other = wishes[static_cast<std::size_t>(r)];
    if (std::equal(other.begin(), other.begin() + static_cast<std::ptrdiff_t>(columns), wishes[0].begin())) continue;
    throw CommError(r, fmt::format("rank {} of {}: the ranks disagree: {} allocates {} bytes of {}, {} {} bytes of {}; "
                                   "every rank must allocate the same, in the same order",
                                   rank(), size(), setup_.rank_name(0), wishes[0][0], static_cast<DType>(wishes[0][1]),
                                   setup_.rank_name(r), other[0], static_cast<DType>(other[1])));
  }
  if (!member_->connected()) member_->connect(fingerprint({}, call_count() + host_->call_count()));
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    if (std::ranges::any_of(wishes, [&](const auto& theirs) { return theirs[columns + i] != 0; })) continue;
    member_->unshare(blocks_[i]->data);
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (bytes == 0) return zeros(shape, {.dtype = dtype, .device = device});
  void* const memory = member_->allocate(bytes);
  auto block = memory != nullptr ? std::make_shared<Block>(*member_, memory) : nullptr;
  const auto got = exchange({memory != nullptr});
  for (int r = 0; r < size(); ++r)
    check(got[static_cast<std::size_t>(r)][0] != 0, "allocate",
          "{} bytes of memory for NCCL on each of {} devices cannot be had on {}", bytes, size(), setup_.rank_name(r));
  member_->share(memory, bytes);
  blocks_.push_back(block);
  auto storage = std::make_shared<Storage>(memory, bytes, device, std::move(block));
  const NoGradGuard no_grad;
  return make_view(std::move(storage), 0, shape, contiguous_strides(shape), dtype).zero_();
}

}  // namespace

const NcclTable& nccl_module() {
  static const NcclTable& table = []() -> const NcclTable& {
    std::string reason;
    void* const entry = open_module(kNcclModule, kNcclModuleVariable, kNcclEntry, reason);
    check(
        entry != nullptr, "nccl",
        "NCCL cannot be used, by which tensors go from GPU to GPU: {}; install NCCL and build again, or use tensors of "
        "the CPU",
        reason);
    return *reinterpret_cast<NcclEntry*>(entry)();
  }();
  return table;
}

std::shared_ptr<ProcessGroup> make_nccl_group(const GroupSetup& setup) {
  if (t_thread_rank != nullptr) return std::make_shared<NcclGroup>(setup, make_thread_group(setup));
  const bool one_host = std::ranges::all_of(setup.hosts, [&](int host) { return host == setup.hosts.front(); });
#ifdef TANDEM_GLOO
  if (!one_host) return std::make_shared<NcclGroup>(setup, make_gloo_group(setup));
#else
  check(one_host, kInit,
        "backend 'nccl' on several hosts needs gloo, which is not built in; install libgloo-dev and build again");
#endif
  return std::make_shared<NcclGroup>(setup, make_shm_group(setup));
}

}  // namespace tandem::parallel
