// What DistributedDataParallel must do, as functions that every rank of a group runs: over threads in ddp_test.cpp,
// over processes in distributed_program.cpp. They throw Error where something does not hold.
#pragma once
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>
#include <string_view>

#include <tandem/tandem.h>

namespace tandem::test {

using Group = std::shared_ptr<parallel::ProcessGroup>;

struct DdpCase {
  const char* name;
  void (*run)(const Group& group);
};
std::vector<DdpCase> equality_cases();
std::vector<DdpCase> gradient_cases();
std::vector<DdpCase> loss_cases();
std::vector<DdpCase> unused_cases();
std::vector<DdpCase> mechanism_cases();
std::vector<DdpCase> failure_cases();
std::vector<DdpCase> consistency_cases();
std::vector<DdpCase> checkpoint_cases();
std::vector<DdpCase> join_cases();
std::vector<DdpCase> join_pair_cases();
std::vector<DdpCase> join_failure_cases();
std::vector<DdpCase> guard_cases();
std::vector<DdpCase> hook_cases();
std::vector<DdpCase> hook_fault_cases();
std::vector<DdpCase> powersgd_cases();

/// Runs every case; an error names it.
inline void run_ddp_cases(const Group& group) {
  for (const auto& cases :
       {equality_cases(), gradient_cases(), loss_cases(), unused_cases(), mechanism_cases(), failure_cases(),
        consistency_cases(), checkpoint_cases(), guard_cases(), hook_cases(), hook_fault_cases(), powersgd_cases(),
        join_cases(), join_pair_cases(), join_failure_cases()})
    for (const DdpCase& c : cases) try {
        c.run(group);
      } catch (const std::exception& e) {
        throw Error(fmt::format("{}, rank {} of {}: {}", c.name, group->rank(), group->size(), e.what()));
      }
}

inline void require(bool holds, std::string_view what) { check(holds, "ddp_cases", "does not hold: {}", what); }
inline void require_close(const Tensor& a, const Tensor& b, double tolerance, std::string_view what) {
  const NoGradGuard no_grad;
  check(a.defined() && b.defined() && allclose(a.detach(), b.detach(), tolerance, tolerance), "ddp_cases",
        "{} differs:\n{}\n{}", what, a, b);
}
/// The text of the error that `body` throws, which has all these parts.
template <class Body>
std::string require_error(std::initializer_list<std::string> parts, const Body& body) {
  std::string text;
  try {
    body();
  } catch (const Error& e) {
    text = e.what();
  }
  for (const std::string& part : parts)
    check(text.find(part) != std::string::npos, "ddp_cases", "'{}' is missing in: '{}'", part, text);
  return text;
}

/// Values that look random and are the same everywhere.
inline Tensor wave(const Shape& shape, double phase, DType dtype = float64) {
  Tensor t = empty(shape, {.dtype = float64});
  auto* data = t.data<double>();
  for (std::int64_t i = 0; i < t.numel(); ++i) data[i] = std::sin(1.7 * static_cast<double>(i * i % 101) + phase);
  return t.to(dtype);
}
inline Tensor labels(std::int64_t rows, std::int64_t classes, std::int64_t phase) {
  Tensor t = empty({rows}, {.dtype = int64});
  for (std::int64_t i = 0; i < rows; ++i) t.data<std::int64_t>()[i] = (i * 7 + phase * 3 + i * i) % classes;
  return t;
}
/// Gives a model fixed parameters.
inline void fill(nn::Module& model, double phase = 0) {
  const NoGradGuard no_grad;
  for (Tensor& p : model.parameters()) p.copy_(wave(p.shape(), phase += 0.9).mul_(0.4));
}
/// The rows of this rank: parts whose sizes differ by at most one.
inline Tensor part(const Tensor& t, const Group& group) {
  const std::int64_t rows = t.size(0), rank = group->rank(), size = group->size();
  return t.slice(0, rows * rank / size, rows * (rank + 1) / size);
}
/// Linear, ReLU, Linear: 6 -> 16 -> 4.
inline std::shared_ptr<nn::SequentialImpl> make_mlp(DType dtype = float64, double phase = 0) {
  auto net = std::make_shared<nn::SequentialImpl>(nn::Linear(6, 16), nn::ReLU(), nn::Linear(16, 4));
  net->to(dtype);
  fill(*net, phase);
  return net;
}
/// The average over the ranks of a gradient that this rank would have alone.
inline Tensor average(const Tensor& t, const Group& group) {
  Tensor mine = t.detach().clone();
  group->all_reduce(mine, parallel::ReduceOp::avg).wait();
  return mine;
}

}  // namespace tandem::test
