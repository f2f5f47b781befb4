// Hooks on gradients: many for each tensor, called in the order they were added, each removed when its handle dies.
#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/io/state.h>
#include <tandem/tensor/tensor.h>

namespace tandem::autograd {

/// A gradient hook sees the gradient and may return another; an undefined tensor keeps it.
using GradientHook = UniqueFunction<Tensor(const Tensor&)>;
/// A post-accumulate hook sees the leaf, whose grad() is up to date.
using LeafHook = UniqueFunction<void(const Tensor&)>;
/// Called with the optimizer before a parameter's first step, when nothing has changed yet; kept until it has returned.
using StepHook = UniqueFunction<void(const Stateful& optimizer)>;

template <class Hook>
class HookList;

/// Owns a hook's registration. Destroying or resetting it removes the hook; release() leaves the hook for good.
class [[nodiscard]] HookHandle {
 public:
  HookHandle() = default;
  HookHandle(HookHandle&&) noexcept = default;
  HookHandle& operator=(HookHandle&& other) noexcept {
    reset();
    remove_ = std::move(other.remove_);
    return *this;
  }
  ~HookHandle() { reset(); }
  void reset() {
    if (remove_) std::exchange(remove_, {})();
  }
  void release() { remove_ = {}; }

 private:
  template <class Hook>
  friend class HookList;
  explicit HookHandle(UniqueFunction<void()> remove) : remove_(std::move(remove)) {}
  UniqueFunction<void()> remove_;
};

/// The hooks of one tensor, shared with the handles that remove them.
template <class Hook>
class HookList {
 public:
  HookHandle add(Hook hook) {
    if (!entries_) entries_ = std::make_shared<Entries>();
    const std::uint64_t id = entries_->next++;
    entries_->list.push_back({id, std::make_shared<Hook>(std::move(hook))});
    return HookHandle([entries = std::weak_ptr<Entries>(entries_), id] {
      if (auto e = entries.lock()) std::erase_if(e->list, [id](const Entry& entry) { return entry.id == id; });
    });
  }
  bool empty() const { return !entries_ || entries_->list.empty(); }
  /// A copy, so that a hook may remove itself or others while the list is walked.
  std::vector<std::shared_ptr<Hook>> snapshot() const {
    std::vector<std::shared_ptr<Hook>> hooks;
    if (entries_)
      for (const Entry& e : entries_->list) hooks.push_back(e.hook);
    return hooks;
  }

 private:
  struct Entry {
    std::uint64_t id;
    std::shared_ptr<Hook> hook;
  };
  struct Entries {
    std::uint64_t next = 0;
    std::vector<Entry> list;
  };
  std::shared_ptr<Entries> entries_;
};

}  // namespace tandem::autograd
