#include <tandem/parallel/on_device.h>

#include <tandem/autograd/node.h>

namespace tandem::parallel {

bool share_memory(Device a, Device b) { return a == b || (a.is_cpu() && b.is_cpu()); }

Tensor on_device(const Tensor& t, Device device) {
  const auto& impl = t.impl();
  const Device from = impl->storage->device();
  if (from == device) return t;
  if (!share_memory(from, device)) return t.to(device);
  Tensor y = make_view(std::make_shared<Storage>(impl->storage, device), impl->offset, impl->shape, impl->strides,
                       impl->dtype);
  // The gradient is copied: its receiver may keep it and write to it.
  if (autograd::needs_grad(t))
    autograd::record("on_device", {&t}, y, [from](autograd::Gradients& g) { g.set(0, g[0].to(from)); });
  return y;
}

}  // namespace tandem::parallel
