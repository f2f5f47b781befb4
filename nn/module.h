// Module: a piece of a model. It registers its parameters, buffers and child modules by name; everything else here
// (moving, saving, printing, training mode) follows from that registry.
// Rule: forward writes no ordinary member, because several threads may run it at once; state that forward changes is a
// Buffer.
#pragma once
#include <concepts>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/io/state.h>
#include <tandem/tensor/tensor.h>

namespace tandem::nn {

/// A handle to a tensor that is trained. Another tensor cannot be assigned to it, since the registry would not notice:
/// write values with copy_ under NoGradGuard.
class Parameter : public Tensor {
 public:
  Parameter() = default;
  Parameter(const Tensor& tensor) : Tensor(tensor) {}
  Parameter(const Parameter&) = default;
  Parameter& operator=(const Parameter&) = default;
  Parameter& operator=(const Tensor&) = delete;
};

/// A handle to a tensor that belongs to the model's state but is not trained. forward may change it in place.
class Buffer : public Tensor {
 public:
  Buffer() = default;
  Buffer(const Tensor& tensor) : Tensor(tensor) {}
  Buffer(const Buffer&) = default;
  Buffer& operator=(const Buffer&) = default;
  Buffer& operator=(const Tensor&) = delete;
};

/// Base of all models and layers: parameters, buffers and submodules with names, and a forward.
class Module : public Stateful {
 public:
  Module() = default;
  Module(const Module&) = delete;  // a copy would share its parameters with the original
  Module& operator=(const Module&) = delete;

  /// The computation of a module with one input and one output; by default forward_all with one tensor.
  virtual Tensor forward(const Tensor& x);
  /// The computation of a module with any number of inputs and outputs; by default forward. A module overrides one of
  /// the two; a call of one that overrides neither throws Error.
  virtual std::vector<Tensor> forward_all(std::span<const Tensor> inputs);
  Tensor operator()(const Tensor& x) { return forward(x); }
  std::vector<Tensor> operator()(std::initializer_list<Tensor> inputs) {
    return forward_all({inputs.begin(), inputs.size()});
  }
  std::vector<Tensor> operator()(const std::vector<Tensor>& inputs) { return forward_all(inputs); }

  // Registration, in constructors. Names must not be empty, taken, or contain a dot; else Error.

  /// Adds a child module, given as std::shared_ptr or holder, and returns it.
  template <class M>
  std::shared_ptr<M> register_module(std::string name, std::shared_ptr<M> module) {
    add_child(std::move(name), module);
    return module;
  }
  template <class H>
  requires requires(const H& h) { h.ptr(); }
  H register_module(std::string name, H holder) {
    add_child(std::move(name), holder.ptr());
    return holder;
  }
  /// Adds a parameter and returns its handle. The tensor must be a leaf; one that is not dense is copied. A tensor that
  /// is registered in several places is one tied parameter.
  Parameter register_parameter(std::string name, const Tensor& tensor, bool requires_grad = true);
  /// Adds a buffer and returns its handle. One that is not dense is copied.
  Buffer register_buffer(std::string name, const Tensor& tensor);

  // The registry, parents first, in the order of registration. Names are joined by dots: "stack.0.weight".

  /// Parameters of this module and all below it, each once.
  std::vector<Tensor> parameters() const;
  NamedTensors named_parameters() const;
  std::vector<Tensor> buffers() const;
  NamedTensors named_buffers() const;
  /// This module (named "") and all below it, each once.
  std::vector<Module*> modules();
  std::vector<std::pair<std::string, Module*>> named_modules();
  /// The modules directly below this one.
  std::vector<std::shared_ptr<Module>> children() const;
  const std::vector<std::pair<std::string, std::shared_ptr<Module>>>& named_children() const { return children_; }
  /// Calls `function` on every module, children before their parents.
  void apply(FunctionRef<void(Module&)> function);

  // Changes to all modules, parameters and buffers below.

  /// Switches between training and evaluation, which layers such as Dropout tell apart.
  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const { return training_; }
  /// Moves parameters, buffers and gradients to a device. Handles stay valid; throws Error if there is no such device.
  void to(Device device);
  /// Converts floating parameters, buffers and gradients to float32 or float64.
  void to(DType dtype);
  /// Makes all gradients undefined.
  void zero_grad();
  /// Turns recording for backward on or off, for all float32 and float64 parameters.
  void requires_grad_(bool on = true);

  // State. A tensor with several names is listed under each, as in PyTorch; loading any of them is enough.

  std::string state_name() const override { return "model"; }
  NamedTensors state_dict() const override;
  std::vector<std::string> state_problems(const NamedTensors& state) const override;
  void load_state_dict(const NamedTensors& state) override { load_state_dict(state, true); }
  /// Copies values in. Throws Error listing every mismatch, and then the model is unchanged. Without `strict` missing
  /// and unexpected entries are passed over and returned, a sentence each.
  std::vector<std::string> load_state_dict(const NamedTensors& state, bool strict);

  // Printing.

  /// The name of the module's kind: by default its type without namespace and "Impl".
  virtual std::string name() const;
  /// What stands between the parentheses, such as "p=0.5".
  virtual std::string extra() const { return ""; }
  /// The tree of modules as PyTorch prints it.
  std::string str() const;

 protected:
  /// Adds the one child of a wrapper, whose names get no prefix: they are those of the wrapped module.
  void register_wrapped(std::shared_ptr<Module> module);

 private:
  using Visited = std::vector<std::pair<std::string, const Module*>>;
  void add_child(std::string name, std::shared_ptr<Module> module);
  void adopt_child(const char* op, std::string name, std::shared_ptr<Module> module);
  void check_name(const char* op, const std::string& name) const;
  void collect(const std::string& prefix, Visited& out) const;
  Visited every_module() const;
  NamedTensors named(NamedTensors Module::*kind) const;
  void convert(FunctionRef<Tensor(const Tensor&)> function);
  struct Mismatches;
  Mismatches compare(const NamedTensors& state) const;

  NamedTensors parameters_, buffers_;
  std::vector<std::pair<std::string, std::shared_ptr<Module>>> children_;
  bool training_ = true;
};

}  // namespace tandem::nn

template <std::derived_from<tandem::nn::Module> T>
struct fmt::formatter<T> : tandem::StrFormatter<T> {};
