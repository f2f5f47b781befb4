#include <tandem/parallel/unused_parameters.h>

#include <tandem/autograd/engine.h>
#include <tandem/autograd/grad_mode.h>
#include <tandem/tensor/create.h>

namespace tandem::parallel {

void UnusedParameters::keep(std::size_t i) {
  const Tensor gradient = reducer_.parameter(i).grad();
  if (gradient.defined() && !reducer_.touched(i)) kept_[i] = gradient.clone();
}

void UnusedParameters::begin() {
  const NoGradGuard no_grad;
  kept_.assign(reducer_.size(), {});
  for (std::size_t i = 0; i < reducer_.size(); ++i) {
    if (autograd::reaches(reducer_.parameter(i))) continue;
    keep(i);
    reducer_.mark_ready(i);
  }
}

void UnusedParameters::begin_without_batch(bool keeps) {
  const NoGradGuard no_grad;
  kept_.assign(reducer_.size(), {});
  for (std::size_t i = 0; keeps && i < reducer_.size(); ++i) keep(i);
}

std::exception_ptr UnusedParameters::end(double scale) {
  const NoGradGuard no_grad;
  Tensor used = zeros({static_cast<std::int64_t>(reducer_.size())}, {.dtype = int32});
  auto* bits = used.data<std::int32_t>();
  for (std::size_t i = 0; i < reducer_.size(); ++i) {
    if (!kept_[i].defined()) keep(i);                                         // reached, but nothing has come
    bits[i] = reducer_.touched(i) && reducer_.parameter(i).grad().defined();  // not what zero_grad has thrown away
  }
  reducer_.launch_rest(true);
  Work work;
  std::exception_ptr error;
  try {
    work = group_->all_reduce(used, ReduceOp::max);
  } catch (...) {
    error = std::current_exception();
  }
  if (const std::exception_ptr first = reducer_.wait(scale)) error = first;
  try {
    work.wait();
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  if (error) return error;
  bits = used.data<std::int32_t>();
  for (std::size_t i = 0; i < reducer_.size(); ++i) {
    Tensor parameter = reducer_.parameter(i);
    const bool restored = bits[i] == 0 && kept_[i].defined();
    if ((bits[i] != 0 || restored) && !parameter.grad().defined()) parameter.set_grad(reducer_.view(i));
    if (restored) parameter.grad().copy_(kept_[i]);
  }
  kept_.clear();
  return nullptr;
}

void UnusedParameters::abandon(const std::string& reason) {
  reducer_.fail_rest(reason);
  Work work;
  try {
    work = group_->fail(reason);
  } catch (const std::exception&) {  // the backward's own error is on its way
  }
  (void)reducer_.wait();
  (void)work.exception();
}

}  // namespace tandem::parallel
