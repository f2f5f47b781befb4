// The step over all parameters, and state as named tensors.
#include <tandem/optim/optimizer.h>

#include <algorithm>
#include <set>

#include <tandem/autograd/grad_mode.h>
#include <tandem/autograd/node.h>
#include <tandem/optim/state_reader.h>
#include <tandem/tensor/backend.h>
#include <tandem/tensor/capture.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/fault.h>
#include <tandem/tensor/threads.h>
#include <tandem/tensor/trace.h>

namespace tandem::optim {
namespace {

// Elements begin .. end-1 of a dense view, as a vector.
View part(View view, int64_t begin, int64_t end) {
  if (view.data == nullptr) return view;
  view.data = static_cast<char*>(view.data) + static_cast<std::size_t>(begin) * size_of(view.dtype);
  view.dims = 1;
  view.shape[0] = end - begin;
  view.strides[0] = 1;
  return view;
}

constexpr const char* kStep = "optimizer step";  // in a trace

}  // namespace

// The update of one parameter.
struct Optimizer::Work {
  std::size_t group = 0;
  Update update;
  std::shared_ptr<const ReplicaSet> shared;  // whose devices divide the work; null when it is one device's
};

void check_parameters(const std::string& op, std::span<const Tensor> parameters) {
  std::set<const void*> known;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& p = parameters[i];
    check(p.defined(), op, "parameter {} is undefined; assign a tensor to it before the optimizer is made", i);
    check(known.insert(p.identity().get()).second, op,
          "parameter {} is in the list or in another group already; give each parameter once", i);
    check(p.is_leaf(), op,
          "parameter {} was computed by a recorded operation; optimize the tensors it was computed from, or pass "
          "detach().requires_grad_()",
          i);
    check(is_real(p.dtype()), op, "parameter {} is {}; convert it to float32 or float64 with .to(float32)", i,
          p.dtype());
    check(p.is_contiguous(), op, "parameter {} of shape {} is not contiguous; make it with contiguous()", i, p.shape());
  }
}

void Optimizer::append_group(std::vector<Tensor> parameters) {
  const std::string op = name();
  check(!parameters.empty(), op,
        "the list of parameters is empty; pass model.parameters(), and leave out a group that has none");
  std::vector<Tensor> all = this->parameters();
  all.insert(all.end(), parameters.begin(), parameters.end());
  check_parameters(op, all);
  const std::size_t group = group_sizes_.size();
  group_sizes_.push_back(parameters.size());
  for (Tensor& p : parameters) slots_.push_back({.parameter = std::move(p), .group = group, .buffers = {}});
}

void Optimizer::check_settings(const Settings& settings) const {
  const std::string problem = settings_problem(values_of(settings));
  check(problem.empty(), name(), "{}", problem);
}

std::vector<double> Optimizer::setting_values(std::size_t group) const { return values_of(settings(group)); }

void Optimizer::check_group(std::size_t group) const {
  check(group < group_count(), name(), "there is no group {}; the optimizer has {}, counted from 0", group,
        group_count());
}

double Optimizer::lr(std::size_t group) const {
  check_group(group);
  return settings(group).front().second;
}

void Optimizer::set_lr(std::size_t group, double value) {
  check_group(group);
  Settings changed = settings(group);
  changed.front().second = value;
  check_settings(changed);
  set_settings(group, values_of(changed));
}

void Optimizer::set_lr(double value) {
  for (std::size_t group = 0; group < group_count(); ++group) set_lr(group, value);
}

std::vector<Tensor> Optimizer::parameters() const {
  std::vector<Tensor> all;
  for (const Slot& slot : slots_) all.push_back(slot.parameter);
  return all;
}

void Optimizer::zero_grad() {
  for (Slot& slot : slots_) slot.parameter.set_grad({});
}

// A model may have been moved or converted since its gradient was computed.
Tensor Optimizer::checked_gradient(std::size_t index) const {
  const Slot& slot = slots_[index];
  const Tensor& p = slot.parameter;
  Tensor g = p.grad();
  if (!g.defined()) return g;
  check(
      g.shape() == p.shape() && g.dtype() == p.dtype() && g.device() == p.device(), name(),
      "parameter {} is {} {} on {}, but its gradient is {} {} on {}; call zero_grad() and backward() after a model is "
      "moved or converted",
      index, p.dtype(), p.shape(), p.device(), g.dtype(), g.shape(), g.device());
  if (const CaptureWatch* const watch = t_capture_watch)
    check(
        p.device() == watch->device, name(),
        "parameter {} lies on {}, and a graph of {} is being captured, which could not update it; give the parameters "
        "of other devices an optimizer of their own, and call its step outside",
        index, p.device(), watch->device);
  check(p.is_contiguous(), name(), "parameter {} of shape {} is no longer contiguous; set its data to contiguous()",
        index, p.shape());
  for (const Tensor& buffer : slot.buffers)
    check(buffer.shape() == p.shape(), name(),
          "parameter {} has shape {} now, but its state has {}; make a new optimizer after changing a model", index,
          p.shape(), buffer.shape());
  return g.contiguous();
}

void Optimizer::prepare_buffers(Slot& slot) const {
  const Tensor& p = slot.parameter;
  if (slot.steps == 0) {
    const std::size_t count = buffer_names(setting_values(slot.group)).size();
    slot.buffers.clear();
    while (slot.buffers.size() < count)
      slot.buffers.push_back(empty(p.shape(), {.dtype = p.dtype(), .device = p.device()}));
  }
  for (Tensor& buffer : slot.buffers)
    if (buffer.device() != p.device() || buffer.dtype() != p.dtype()) buffer = buffer.to(p.device()).to(p.dtype());
}

// The parts of device number `device` among those that share parameters; with -1, what is one device's alone.
void Optimizer::run(std::span<const Work> works, int device) {
  std::vector<Update> updates;  // of one group, device and type
  std::size_t group = 0;
  const auto flush = [&] {
    if (!updates.empty()) this->update(group, updates);
    updates.clear();
  };
  const auto at = static_cast<std::size_t>(device);
  for (const Work& work : works) {
    if ((work.shared == nullptr) != (device < 0)) continue;
    const int64_t begin = work.shared ? work.shared->cuts[at] : 0;
    const int64_t end = work.shared ? work.shared->cuts[at + 1] : work.update.parameter.numel();
    if (begin == end && !cuda::capturing()) continue;  // replays count the step of an empty one, too
    Update update = work.update;
    update.parameter = part(update.parameter, begin, end);
    update.gradient = part(update.gradient, begin, end);
    for (View& buffer : update.buffers) {
      buffer = part(buffer, begin, end);
      // Buffers begin as zeros, written first by the device that will use them.
      if (buffer.data != nullptr && update.step == 1) backend(buffer.device).fill(buffer, 0);
    }
    if (!updates.empty() && (group != work.group || updates[0].parameter.device != update.parameter.device ||
                             updates[0].parameter.dtype != update.parameter.dtype))
      flush();
    group = work.group;
    updates.push_back(update);
  }
  flush();
}

void call_first_step_hooks(std::span<const Tensor> parameters, const Stateful& optimizer) {
  std::vector<std::shared_ptr<const autograd::StepHook>> hooks;  // in the order of the parameters
  for (const Tensor& p : parameters)
    if (const autograd::Meta* meta = autograd::meta_of(p); meta != nullptr && meta->before_first_step)
      if (std::find(hooks.begin(), hooks.end(), meta->before_first_step) == hooks.end())
        hooks.push_back(meta->before_first_step);
  if (hooks.empty()) return;
  for (const auto& hook : hooks) (*hook)(optimizer);
  for (const Tensor& p : parameters)
    if (autograd::Meta* meta = autograd::meta_of(p)) meta->before_first_step = nullptr;
}

Optimizer::Replayed Optimizer::replayed(std::span<const Update> updates) {
  for (const Update& update : updates)
    check(
        update.step > 1 || slots_[update.index].buffers.empty(), name(),
        "parameter {} has no state yet, which is made by the first step; make one before a step is captured in a graph",
        update.index);
  captured_ = true;
  std::vector<Update> kept(updates.begin(), updates.end());
  std::vector<std::size_t> buffers;  // how many each has
  for (const Update& update : kept) buffers.push_back(slots_[update.index].buffers.size());
  auto check_it = [this, alive = std::weak_ptr<const void>(alive_), kept, buffers = std::move(buffers)] {
    check(!alive.expired(), "Graph", "the optimizer whose step was captured is gone; keep it as long as the graph");
    for (std::size_t i = 0; i < kept.size(); ++i) {
      const Update& update = kept[i];
      const Slot& slot = slots_[update.index];
      bool same = slot.parameter.raw().data == update.parameter.data && slot.buffers.size() == buffers[i];
      for (std::size_t k = 0; same && k < buffers[i]; ++k) same = slot.buffers[k].raw().data == update.buffers[k].data;
      check(same, name(),
            "parameter {} or its state has other memory than when the step was captured; capture the graph again after "
            "a model is moved or a state is loaded",
            update.index);
    }
  };
  auto next = [this, kept = std::move(kept)]() mutable -> std::span<const Update> {
    for (Update& update : kept) {
      Slot& slot = slots_[update.index];
      slot.parameter.mark_changed();
      for (Tensor& buffer : slot.buffers) buffer.mark_changed();
      update.step = ++slot.steps;
    }
    return kept;
  };
  return {.check = std::move(check_it), .next = std::move(next)};
}

void Optimizer::step() {
  fault::point(fault::Point::step);
  const trace::Span span(kStep);
  const NoGradGuard no_grad;
  captured_ = false;
  std::vector<Tensor> gradients;
  gradients.reserve(slots_.size());
  for (std::size_t i = 0; i < slots_.size(); ++i) gradients.push_back(checked_gradient(i));
  call_first_step_hooks(parameters(), *this);
  std::vector<Work> works;
  works.reserve(slots_.size());
  std::shared_ptr<const ReplicaSet> shared;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!gradients[i].defined()) continue;
    Slot& slot = slots_[i];
    prepare_buffers(slot);
    Work& work = works.emplace_back();
    work.group = slot.group;
    work.update.parameter = slot.parameter.raw_for_write();
    work.update.gradient = gradients[i].raw();
    for (std::size_t k = 0; k < slot.buffers.size(); ++k) work.update.buffers[k] = slot.buffers[k].raw_for_write();
    work.update.step = slot.steps + 1;
    work.update.index = i;
    const auto& set = slot.parameter.identity()->replicas;
    if (!set || set->devices.size() < 2 || set->cuts.back() != work.update.parameter.numel()) continue;
    if (!shared) shared = set;
    if (set->devices == shared->devices) work.shared = set;
  }
  // What is one device's alone goes first.
  const auto alone = std::find_if(works.begin(), works.end(), [](const Work& work) { return !work.shared; });
  if (alone != works.end()) {
    const trace::DeviceSpan device_span(kStep, alone->update.parameter.device);
    run(works, -1);
  }
  if (shared)
    run_on_devices(shared->devices, [&](int i) {
      const trace::DeviceSpan device_span(kStep, shared->devices[static_cast<std::size_t>(i)]);
      run(works, i);
    });
  for (std::size_t i = 0; i < slots_.size(); ++i)
    if (gradients[i].defined() && !captured_) ++slots_[i].steps;
}

NamedTensors Optimizer::state_dict() const {
  NamedTensors state;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.steps == 0) continue;
    state.emplace_back(fmt::format("{}.step", i), number_entry(slot.steps));
    const std::vector<std::string> names = buffer_names(setting_values(slot.group));
    for (std::size_t k = 0; k < names.size(); ++k)
      state.emplace_back(fmt::format("{}.{}", i, names[k]), slot.buffers[k]);
  }
  for (std::size_t group = 0; group < group_count(); ++group) {
    for (const auto& [setting, value] : settings(group))
      state.emplace_back(fmt::format("group.{}.{}", group, setting), number_entry(value));
    state.emplace_back(fmt::format("group.{}.parameters", group),
                       number_entry(static_cast<int64_t>(group_sizes_[group])));
  }
  return state;
}

std::vector<std::string> Optimizer::read(const NamedTensors& state, Loaded& loaded) const {
  StateReader reader(state);
  for (std::size_t group = 0; group < group_count(); ++group) {
    std::vector<double>& values = loaded.settings.emplace_back();
    bool complete = true;
    for (const auto& setting : settings(group)) {
      const std::string entry = fmt::format("group.{}.{}", group, setting.first);
      complete = complete && reader.has(entry);
      values.push_back(reader.real(entry));
    }
    if (std::string problem = complete ? settings_problem(values) : std::string(); !problem.empty())
      reader.note(fmt::format("group.{}: {}", group, problem));
    const auto here = static_cast<int64_t>(group_sizes_[group]);
    const std::string entry = fmt::format("group.{}.parameters", group);
    if (const int64_t there = reader.integer(entry, 0); reader.has(entry) && there != here)
      reader.note(fmt::format("group {} has {} parameters in the state, but {} here", group, there, here));
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = loaded.slots.emplace_back();
    slot.parameter = slots_[i].parameter;
    slot.group = slots_[i].group;
    const std::vector<std::string> names = buffer_names(loaded.settings[slot.group]);
    bool any = reader.has(fmt::format("{}.step", i));
    for (const std::string& buffer : names) any = any || reader.has(fmt::format("{}.{}", i, buffer));
    if (!any) continue;
    slot.steps = reader.integer(fmt::format("{}.step", i), 1);
    for (const std::string& buffer : names)
      slot.buffers.push_back(
          reader.values(fmt::format("{}.{}", i, buffer), slot.parameter.shape(), slot.parameter.dtype()));
  }
  return reader.finish();
}

std::vector<std::string> Optimizer::state_problems(const NamedTensors& state) const {
  Loaded loaded;
  return read(state, loaded);
}

void Optimizer::load_state_dict(const NamedTensors& state) {
  const NoGradGuard no_grad;
  Loaded loaded;
  check_fits(name(), "an optimizer of this kind for this model", read(state, loaded));
  // Into new memory, so that a failure on the way leaves the old state whole.
  for (Slot& slot : loaded.slots)
    for (Tensor& buffer : slot.buffers)
      buffer = empty(buffer.shape(), {.dtype = buffer.dtype(), .device = slot.parameter.device()}).copy_(buffer);
  for (std::size_t group = 0; group < group_count(); ++group) set_settings(group, loaded.settings[group]);
  slots_ = std::move(loaded.slots);
}

}  // namespace tandem::optim
