#include <tandem/parallel/backward_end.h>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/node.h>

namespace tandem::parallel {
namespace {

// Queued for the end of a backward; one that is destroyed without having been called was abandoned.
class AtEnd {
 public:
  explicit AtEnd(std::shared_ptr<BackwardListener> listener) : listener_(std::move(listener)) {}
  AtEnd(AtEnd&&) noexcept = default;
  ~AtEnd() {
    if (listener_) listener_->abandon();
  }
  void operator()() { std::exchange(listener_, nullptr)->end(); }

 private:
  std::shared_ptr<BackwardListener> listener_;
};

}  // namespace

Tensor listen(const char* name, const Tensor& result, std::shared_ptr<BackwardListener> listener) {
  if (!autograd::needs_grad(result)) return result;
  Tensor y = result.detach();
  autograd::record(name, {&result}, y, [listener = std::move(listener)](autograd::Gradients& g) {
    if (autograd::accumulates_gradients() && autograd::first_in_backward(listener.get())) {
      autograd::queue_callback(AtEnd(listener));
      listener->begin();
    }
    g.set(0, g[0]);
  });
  return y;
}

}  // namespace tandem::parallel
