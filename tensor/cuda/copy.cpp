// Copies between host and devices, and between devices: in one piece where both sides are dense and of one type, else
// by way of a dense copy on the side that can make it.
#include <tandem/tensor/cuda/allocator.h>
#include <tandem/tensor/cuda/backend.h>
#include <tandem/tensor/cuda/capture.h>
#include <tandem/tensor/cuda/device_error.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/pinned.h>

namespace tandem::cuda {
namespace {

std::size_t bytes_of(const View& view) { return static_cast<std::size_t>(view.numel()) * size_of(view.dtype); }

// A dense view of `like`'s shape over other memory.
View dense(const View& like, void* data, DType dtype, Device device) {
  View view = like;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  std::int64_t stride = 1;
  for (int i = view.dims - 1; i >= 0; --i) {
    view.strides[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

// Memory of the host for the time of one copy.
class HostScratch {
 public:
  explicit HostScratch(std::size_t bytes) : bytes_(bytes), data_(g_host->cpu->allocate(Device(), bytes)) {}
  ~HostScratch() { g_host->cpu->release(Device(), data_, bytes_); }
  HostScratch(const HostScratch&) = delete;
  HostScratch& operator=(const HostScratch&) = delete;
  void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

void from_host(const View& from, const View& to, bool non_blocking) {
  if (!from.contiguous()) {
    const HostScratch scratch(bytes_of(from));
    const View packed = dense(from, scratch.data(), from.dtype, from.device);
    g_host->cpu->copy(from, packed, false);
    return from_host(packed, to, false);
  }
  const cudaStream_t stream = use(to.device);
  if (from.dtype != to.dtype || !to.contiguous()) {
    const Scratch scratch(to.device, bytes_of(from));
    const View packed = dense(from, scratch.data(), from.dtype, to.device);
    from_host(from, packed, non_blocking);
    return convert(packed, to);
  }
  check_status(cudaMemcpyAsync(to.data, from.data, bytes_of(from), cudaMemcpyHostToDevice, stream), "copy");
  // Ordinary memory may be read later than this call returns; page-locked memory certainly is.
  if (!non_blocking || !note_pinned_use(from.data, stream)) check_status(cudaStreamSynchronize(stream), "copy");
}

void to_host(const View& from, const View& to) {
  const cudaStream_t stream = use(from.device);
  if (from.dtype != to.dtype || !from.contiguous()) {
    const Scratch scratch(from.device, bytes_of(to));
    const View packed = dense(to, scratch.data(), to.dtype, from.device);
    convert(from, packed);
    return to_host(packed, to);
  }
  if (!to.contiguous()) {
    const HostScratch scratch(bytes_of(to));
    const View packed = dense(to, scratch.data(), to.dtype, to.device);
    to_host(from, packed);
    return g_host->cpu->copy(packed, to, false);
  }
  check_status(cudaMemcpyAsync(to.data, from.data, bytes_of(from), cudaMemcpyDeviceToHost, stream), "copy");
  check_status(cudaStreamSynchronize(stream), "copy");
  throw_errors_of_values(from.device);
}

void between_devices(const View& from, const View& to) {
  if (from.dtype != to.dtype || !from.contiguous()) {
    const Scratch scratch(from.device, bytes_of(to));
    const View packed = dense(to, scratch.data(), to.dtype, from.device);
    convert(from, packed);
    return between_devices(packed, to);
  }
  if (!to.contiguous()) {
    const Scratch scratch(to.device, bytes_of(to));
    const View packed = dense(to, scratch.data(), to.dtype, to.device);
    between_devices(from, packed);
    return convert(packed, to);
  }
  // The receiver copies when the sender has made the values, and the sender goes on when they have been read.
  Event made, read;
  const cudaStream_t sender = use(from.device);
  made.record(sender);
  const cudaStream_t receiver = use(to.device);
  made.wait(receiver);
  check_status(
      cudaMemcpyPeerAsync(to.data, to.device.index(), from.data, from.device.index(), bytes_of(from), receiver),
      "copy");
  read.record(receiver);
  use(from.device);
  read.wait(sender);
}

}  // namespace

const Host* g_host = nullptr;

void copy(const View& from, const View& to, bool non_blocking) {
  if (to.numel() == 0) return;
  if (from.device.is_cpu()) {
    check_no_capture("Graph",
                     "values are copied from the host while a graph is captured; make tensors of them before, and copy "
                     "new ones into these before each replay");
    return from_host(from, to, non_blocking);
  }
  if (to.device.is_cpu()) {
    check_no_capture("Graph",
                     "the host reads values (item(), to(\"cpu\"), printing) while a graph is captured, which computes "
                     "none; read them after replay()");
    return to_host(from, to);
  }
  if (from.device != to.device) return between_devices(from, to);
  convert(from, to);
}

}  // namespace tandem::cuda
