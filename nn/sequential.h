// ModuleList: modules by position. Sequential: a list in which each module's output is the next one's input.
#pragma once
#include <concepts>

#include <tandem/nn/holder.h>
#include <tandem/nn/module.h>

namespace tandem::nn {

/// Modules named "0", "1", ...; the module that owns the list says how they are called.
class ModuleListImpl : public Module {
 public:
  /// The given modules: holders or shared pointers.
  template <class... M>
  explicit ModuleListImpl(const M&... modules) {
    (push_back(modules), ...);
  }
  template <class M>
  void push_back(const std::shared_ptr<M>& module) {
    register_module(std::to_string(size()), module);
  }
  template <ModuleHolder H>
  void push_back(const H& holder) {
    push_back(holder.ptr());
  }
  std::size_t size() const { return named_children().size(); }
  bool empty() const { return size() == 0; }
  /// The module at a position; Error when out of range.
  const std::shared_ptr<Module>& operator[](std::size_t i) const {
    check(i < size(), "ModuleList", "index {} is out of range: there are {} modules", i, size());
    return named_children()[i].second;
  }
  /// The module at a position as what it is, as in `net->at<nn::LinearImpl>(0).weight`; Error when it is something
  /// else.
  template <std::derived_from<Module> M>
  M& at(std::size_t i) const {
    M* module = dynamic_cast<M*>((*this)[i].get());
    if (module == nullptr) fail("ModuleList", "module {} is a {}, not of the type asked for", i, (*this)[i]->name());
    return *module;
  }
};
/// Handle to a ModuleListImpl.
struct ModuleList : Holder<ModuleListImpl> {
  using Holder::Holder;
};

/// Calls its modules one after the other. A Linear followed by a ReLU is computed in one pass, with the same values.
class SequentialImpl : public ModuleListImpl {
 public:
  using ModuleListImpl::ModuleListImpl;
  Tensor forward(const Tensor& x) override;
  /// The first module gets all inputs, and each next one all outputs of the one before.
  std::vector<Tensor> forward_all(std::span<const Tensor> inputs) override;
};
/// Handle to a SequentialImpl.
struct Sequential : Holder<SequentialImpl> {
  using Holder::Holder;
};

}  // namespace tandem::nn
