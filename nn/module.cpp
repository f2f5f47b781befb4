// The module registry and what follows from it. State dictionaries are in module_state.cpp.
#include <tandem/nn/module.h>

#include <cxxabi.h>

#include <cstdlib>
#include <typeinfo>
#include <unordered_set>

#include <tandem/autograd/node.h>
#include <tandem/nn/internal.h>

namespace tandem::nn {
namespace {

thread_local const Module* t_in_default_forward = nullptr;

template <class T>
std::vector<T> without_names(std::vector<std::pair<std::string, T>> named) {
  std::vector<T> out;
  out.reserve(named.size());
  for (auto& [name, item] : named) out.push_back(std::move(item));
  return out;
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() || name.empty() ? prefix + name : prefix + '.' + name;
}

std::string indented(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

}  // namespace

Tensor Module::forward(const Tensor& x) {
  struct Mark {
    explicit Mark(const Module* m) : previous(std::exchange(t_in_default_forward, m)) {}
    ~Mark() { t_in_default_forward = previous; }
    const Module* previous;
  };
  const Mark mark(this);
  std::vector<Tensor> outputs = forward_all({&x, 1});
  if (outputs.size() != 1)
    fail("forward", "{} returned {} tensors where one is needed; call it with a list: module({{x}})", name(),
         outputs.size());
  return std::move(outputs.front());
}

std::vector<Tensor> Module::forward_all(std::span<const Tensor> inputs) {
  if (t_in_default_forward == this)
    fail("forward", "{} overrides neither forward nor forward_all; override one of them", name());
  if (inputs.size() != 1)
    fail("forward", "{} was called with {} tensors, but it takes one; override forward_all for several inputs", name(),
         inputs.size());
  std::vector<Tensor> outputs;
  outputs.push_back(forward(inputs.front()));
  return outputs;
}

void Module::check_name(const char* op, const std::string& name) const {
  check(!name.empty(), op, "the name is empty; give one that is not taken in {}", this->name());
  check(name.find('.') == std::string::npos, op,
        "the name '{}' contains a dot, which joins the names of modules; leave it out", name);
  auto taken = [&](const auto& entries, const char* kind) {
    for (const auto& entry : entries)
      if (entry.first == name)
        fail(op, "{} already has a {} named '{}'; choose another name", this->name(), kind, name);
  };
  taken(parameters_, "parameter");
  taken(buffers_, "buffer");
  taken(children_, "module");
}

void Module::add_child(std::string name, std::shared_ptr<Module> module) {
  check_name("register_module", name);
  adopt_child("register_module", std::move(name), std::move(module));
}

void Module::adopt_child(const char* op, std::string name, std::shared_ptr<Module> module) {
  check(module != nullptr, op, "'{}' is an empty handle; make the module first, as in nn::Linear(2, 3)", name);
  for (const Module* below : module->modules())
    if (below == this) fail(op, "'{}' contains {} itself; a module cannot be below itself", name, this->name());
  children_.emplace_back(std::move(name), std::move(module));
}

void Module::register_wrapped(std::shared_ptr<Module> module) {
  check(parameters_.empty() && buffers_.empty() && children_.empty(), "register_wrapped",
        "{} already has entries of its own, whose names could clash; a wrapper holds one module and nothing else",
        name());
  adopt_child("register_wrapped", "", std::move(module));
}

Parameter Module::register_parameter(std::string name, const Tensor& tensor, bool requires_grad) {
  const char* op = "register_parameter";
  check_name(op, name);
  check(tensor.defined(), op, "the tensor of '{}' is undefined; make it first, as in zeros({{3}})", name);
  check(tensor.is_leaf(), op, "the tensor of '{}' was computed by a recorded operation; register its detach()", name);
  check(!requires_grad || is_real(tensor.dtype()), op,
        "'{}' is {}, and only float32 and float64 tensors have gradients; convert it, pass requires_grad = false, or "
        "register it as a buffer",
        name, tensor.dtype());
  const NoGradGuard no_grad;
  Parameter parameter(tensor.contiguous());
  parameter.requires_grad_(requires_grad);
  parameters_.emplace_back(std::move(name), parameter);
  return parameter;
}

Buffer Module::register_buffer(std::string name, const Tensor& tensor) {
  const char* op = "register_buffer";
  check_name(op, name);
  check(tensor.defined(), op, "the tensor of '{}' is undefined; make it first, as in zeros({{3}})", name);
  check(!tensor.requires_grad(), op, "'{}' requires grad; register it as a parameter, or register its detach()", name);
  Buffer buffer(tensor.contiguous());
  buffers_.emplace_back(std::move(name), buffer);
  return buffer;
}

void Module::collect(const std::string& prefix, Visited& out) const {
  out.emplace_back(prefix, this);
  for (const auto& [name, child] : children_) child->collect(joined(prefix, name), out);
}

// With repetitions: a module that is registered in two places appears twice.
Module::Visited Module::every_module() const {
  Visited out;
  collect("", out);
  return out;
}

NamedTensors Module::named(NamedTensors Module::*kind) const {
  NamedTensors out;
  std::unordered_set<const void*> seen;
  for (const auto& [prefix, module] : every_module())
    for (const auto& [name, tensor] : module->*kind)
      if (seen.insert(tensor.identity().get()).second) out.emplace_back(joined(prefix, name), tensor);
  return out;
}

NamedTensors Module::named_parameters() const { return named(&Module::parameters_); }
NamedTensors Module::named_buffers() const { return named(&Module::buffers_); }
std::vector<Tensor> Module::parameters() const { return without_names(named_parameters()); }
std::vector<Tensor> Module::buffers() const { return without_names(named_buffers()); }

std::vector<std::pair<std::string, Module*>> Module::named_modules() {
  std::vector<std::pair<std::string, Module*>> out;
  std::unordered_set<const void*> seen;
  for (const auto& [name, module] : every_module())
    if (seen.insert(module).second) out.emplace_back(name, const_cast<Module*>(module));
  return out;
}
std::vector<Module*> Module::modules() { return without_names(named_modules()); }
std::vector<std::shared_ptr<Module>> Module::children() const { return without_names(children_); }

void Module::apply(FunctionRef<void(Module&)> function) {
  std::unordered_set<const void*> seen;
  auto visit = [&](auto& self, Module& module) -> void {
    if (!seen.insert(&module).second) return;
    for (const auto& [name, child] : module.children_) self(self, *child);
    function(module);
  };
  visit(visit, *this);
}

void Module::train(bool on) {
  for (Module* module : modules()) module->training_ = on;
}

void Module::zero_grad() {
  for (Tensor& p : parameters()) p.set_grad({});
}

void Module::requires_grad_(bool on) {
  for (Tensor& p : parameters())
    if (is_real(p.dtype())) p.requires_grad_(on);
}

// Everything is converted before anything is replaced, so that a failure changes nothing.
void Module::convert(FunctionRef<Tensor(const Tensor&)> function) {
  const NoGradGuard no_grad;
  struct Change {
    Tensor tensor, data, gradient;
  };
  std::vector<Change> changes;
  std::vector<Tensor> tensors = parameters();
  for (Tensor& b : buffers()) tensors.push_back(std::move(b));
  for (const Tensor& t : tensors) {
    const Tensor data = function(t);
    if (data.identity() == t.identity()) continue;
    const Tensor gradient = t.grad();
    changes.push_back({t, data, gradient.defined() ? function(gradient) : gradient});
  }
  for (Change& c : changes) {
    autograd::Meta* meta = autograd::meta_of(c.tensor);
    if (meta != nullptr && meta->leaf) meta->leaf->set_destination({});  // it lies on the old device
    if (c.gradient.defined()) c.tensor.set_grad({});
    c.tensor.set_data(c.data);
    if (c.gradient.defined()) c.tensor.set_grad(c.gradient);
  }
}

void Module::to(Device device) {
  check_exists("to", device);
  convert([&](const Tensor& t) { return t.to(device); });
}

void Module::to(DType dtype) {
  check(is_real(dtype), "to", "modules compute in float32 or float64, not {}; convert single tensors with Tensor::to",
        dtype);
  convert([&](const Tensor& t) { return is_floating(t.dtype()) ? t.to(dtype) : t; });
}

std::string Module::name() const { return kind_of(typeid(*this)); }

std::string kind_of(const std::type_info& type) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string text = demangled != nullptr ? demangled : type.name();
  std::free(demangled);
  std::size_t begin = 0;
  int depth = 0;  // inside the <> of a template or the () of a function
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '<' || text[i] == '(') ++depth;
    if (text[i] == '>' || text[i] == ')') --depth;
    if (depth == 0 && text[i] == ':') begin = i + 1;
  }
  text.erase(0, begin);
  if (text.size() > 4 && text.ends_with("Impl")) text.erase(text.size() - 4);
  return text;
}

std::string Module::str() const {
  if (children_.empty()) return name() + '(' + extra() + ')';
  std::string lines = extra().empty() ? "" : "\n" + extra();
  for (const auto& [name, child] : children_)
    lines += "\n(" + (name.empty() ? std::string("module") : name) + "): " + child->str();
  return name() + '(' + indented(lines) + "\n)";
}

}  // namespace tandem::nn
