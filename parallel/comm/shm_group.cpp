// The backends "shm" and "thread": process groups of ranks that share memory.
#include <unistd.h>

#include <cstring>

#include <fmt/format.h>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/shm_engine.h>
#include <tandem/tensor/create.h>

namespace tandem::parallel {
namespace {

class SharedMemoryGroup : public ProcessGroup {
 public:
  /// Without memory this rank is no member.
  SharedMemoryGroup(const GroupSetup& setup, std::shared_ptr<SharedMemory> memory)
      : size_(static_cast<int>(setup.ranks.size())) {
    if (memory == nullptr) return;
    engine_ = std::make_shared<Engine>(setup, std::move(memory));
    try {
      engine_->meet();
    } catch (...) {
      engine_->abandon("could not be made");
      throw;
    }
  }
  ~SharedMemoryGroup() override {
    if (engine_) engine_->leave();
  }
  int rank() const override { return engine_ ? engine_->rank() : -1; }
  int size() const override { return size_; }

 protected:
  Work start(const Collective& collective) override { return Work(engine_->start(collective)); }
  std::shared_ptr<Engine> engine_;

 private:
  int size_;
};

class ThreadGroup final : public SharedMemoryGroup {
 public:
  using SharedMemoryGroup::SharedMemoryGroup;
  std::string backend() const override { return "thread"; }
};

class ShmGroup final : public SharedMemoryGroup {
 public:
  ShmGroup(const GroupSetup& setup, const std::shared_ptr<ProcessMemory>& memory)
      : SharedMemoryGroup(setup, memory), memory_(memory) {}
  std::string backend() const override { return "shm"; }
  Tensor allocate(const Shape& shape, DType dtype, Device device) override;

 private:
  // One line of numbers from each rank.
  std::vector<std::vector<std::int64_t>> exchange(const std::vector<std::int64_t>& mine);
  std::shared_ptr<ProcessMemory> memory_;
};

std::vector<std::vector<std::int64_t>> ShmGroup::exchange(const std::vector<std::int64_t>& mine) {
  const auto columns = static_cast<std::int64_t>(mine.size());
  Tensor all = empty({size(), columns}, {.dtype = int64});
  all_gather(all, tensor(mine)).wait();
  std::vector<std::vector<std::int64_t>> lines;
  for (int r = 0; r < size(); ++r) lines.push_back(all[r].to_vector<std::int64_t>());
  return lines;
}

// Rank 0 makes a file, in which each rank reserves its own part. Errors travel before they are thrown, so that every
// rank throws.
Tensor ShmGroup::allocate(const Shape& shape, DType dtype, Device device) {
  if (!device.is_cpu()) return ProcessGroup::allocate(shape, dtype, device);  // which says why it cannot be
  check(engine_ != nullptr, "allocate", "this process is not a member of the group; only its members may call it");
  const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
  const std::size_t stride = whole_pages(bytes), total = stride * static_cast<std::size_t>(size());
  FileDescriptor file;
  int error = rank() == 0 && bytes > 0 ? make_memory_file(total, file) : 0;
  std::vector<std::int64_t> mine{static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(dtype), error, getpid(),
                                 file.get()};
  const std::size_t columns = mine.size();
  {
    const std::lock_guard lock(engine_->mutex());
    for (const bool used : memory_->used()) mine.push_back(used);
  }
  const auto wishes = exchange(mine);
  // A place in an allocation may be posted as long as one rank has tensors there, and each looks it up.
  std::vector<bool> used(mine.size() - columns, false);
  for (const auto& theirs : wishes)
    for (std::size_t i = 0; i < used.size(); ++i) used[i] = used[i] || theirs[columns + i] != 0;
  {
    const std::lock_guard lock(engine_->mutex());
    memory_->remove_unused(used);
  }
  for (int r = 1; r < size(); ++r) {
    const auto& other = wishes[static_cast<std::size_t>(r)];
    if (other[0] == wishes[0][0] && other[1] == wishes[0][1]) continue;
    throw CommError(
        r, fmt::format("rank {} of {}: the ranks disagree: {} allocates {} bytes of {}, {} {} bytes of {}; "
                       "every rank must allocate the same, in the same order",
                       rank(), size(), engine_->setup().rank_name(0), wishes[0][0], static_cast<DType>(wishes[0][1]),
                       engine_->setup().rank_name(r), other[0], static_cast<DType>(other[1])));
  }
  error = static_cast<int>(wishes[0][2]);
  if (bytes == 0) return zeros(shape, {.dtype = dtype});
  auto mapping = std::make_shared<Mapping>();
  if (error == 0 && rank() != 0)
    error = open_file_of(static_cast<pid_t>(wishes[0][3]), static_cast<int>(wishes[0][4]), file);
  const std::size_t first = stride * static_cast<std::size_t>(rank());
  if (error == 0) error = reserve(file, first, stride);
  if (error == 0) error = map_file(file, total, *mapping);
  const auto errors = exchange({error});
  for (int r = 0; r < size(); ++r)
    check(errors[static_cast<std::size_t>(r)][0] == 0, "allocate",
          "{} bytes of shared memory on each of {} ranks cannot be had: {} on {}", bytes, size(),
          std::strerror(static_cast<int>(errors[static_cast<std::size_t>(r)][0])), engine_->setup().rank_name(r));
  const std::lock_guard lock(engine_->mutex());
  memory_->add(mapping, stride);
  auto storage = std::make_shared<Storage>(mapping->data() + first, bytes, Device(), mapping);
  return make_view(std::move(storage), 0, shape, contiguous_strides(shape), dtype);
}

bool is_member(const GroupSetup& setup) { return setup.place() >= 0; }

}  // namespace

std::shared_ptr<ProcessGroup> make_shm_group(const GroupSetup& setup) {
  return std::make_shared<ShmGroup>(
      setup, is_member(setup) ? std::make_shared<ProcessMemory>(setup, work_for_groups_of_this_thread) : nullptr);
}

std::shared_ptr<ProcessGroup> make_thread_group(const GroupSetup& setup) {
  return std::make_shared<ThreadGroup>(setup, is_member(setup) ? std::make_shared<ThreadMemory>(setup) : nullptr);
}

}  // namespace tandem::parallel
