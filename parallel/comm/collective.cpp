#include <tandem/parallel/comm/collective.h>

#include <algorithm>
#include <array>
#include <span>
#include <tuple>

#include <fmt/format.h>

#include <tandem/autograd/grad_mode.h>

namespace tandem::parallel {
namespace {

constexpr std::array kOperations = {"all_reduce",     "broadcast",  "reduce", "all_gather", "gather",  "scatter",
                                    "reduce_scatter", "all_to_all", "send",   "recv",       "barrier", "fail"};
constexpr std::array kStages = {"", "at its start", "in the loop", "the loop is over", "an error ends it"};
constexpr std::array kOps = {"sum", "product", "min", "max", "avg"};

template <class Names>
const char* pick(const Names& names, std::int32_t index) {
  return index >= 0 && static_cast<std::size_t>(index) < names.size() ? names[static_cast<std::size_t>(index)]
                                                                      : "unknown";
}

bool has_root(Operation o) {
  return o == Operation::broadcast || o == Operation::reduce || o == Operation::gather || o == Operation::scatter;
}

std::string describe_call(const Fingerprint& f) {
  const auto operation = static_cast<Operation>(f.operation);
  const char* what = pick(kOperations, f.operation);
  if (operation == Operation::barrier || operation == Operation::fail)
    return fmt::format("{} (call {})", what, f.sequence);
  std::string how;
  if (combines(operation)) how += fmt::format("{}, ", pick(kOps, f.op));
  if (has_root(operation)) how += fmt::format("root {}, ", f.root);
  if (operation == Operation::send) how += fmt::format("to {}, ", f.root);
  if (operation == Operation::recv) how += fmt::format("from {}, ", f.root);
  const bool known = f.dims >= 0 && f.dims <= Fingerprint::kMaxDims;
  const auto shape = std::span(f.shape).first(static_cast<std::size_t>(known ? f.dims : 0));
  return fmt::format("{} ({}call {}) of {} {}{}", what, how, f.sequence,
                     known ? fmt::format("{{{}}}", fmt::join(shape, ", ")) : fmt::format("{} elements", f.count),
                     tandem::name(static_cast<DType>(f.dtype)), f.on_gpu != 0 ? " on a GPU" : "");
}

thread_local constinit std::string_view t_purpose;

}  // namespace

Purpose::Purpose(std::string_view what) : before_(t_purpose) {
  if (before_.empty()) t_purpose = what;
}
Purpose::~Purpose() { t_purpose = before_; }
std::string_view Purpose::current() { return t_purpose; }

const char* name(Operation operation) { return pick(kOperations, static_cast<std::int32_t>(operation)); }

Fingerprint fingerprint(const Collective& c, std::uint64_t sequence) {
  if (c.announced) {
    Fingerprint f = *c.announced;
    f.sequence = sequence;
    return f;
  }
  Fingerprint f{.sequence = sequence, .operation = static_cast<std::int32_t>(c.operation)};
  f.stage = static_cast<std::int32_t>(c.stage);
  c.purpose.copy(f.purpose.data(), Purpose::kMaxBytes);
  const Tensor& any = c.input.defined() ? c.input : c.output;
  if (!any.defined()) return f;  // a barrier, or a failure
  f.dtype = static_cast<std::int32_t>(any.dtype());
  f.root = c.root;
  f.op = static_cast<std::int32_t>(c.op);
  const bool of_output = c.operation == Operation::scatter || c.operation == Operation::reduce_scatter;
  const Tensor& share = of_output ? c.output : any;
  f.count = share.numel();
  f.dims = static_cast<std::int32_t>(share.dim());
  if (f.dims <= Fingerprint::kMaxDims) std::copy(share.shape().begin(), share.shape().end(), f.shape.begin());
  return f;
}

bool operator==(const Fingerprint& a, const Fingerprint& b) {
  if (!a.why().empty() && !b.why().empty() && a.why() != b.why()) return false;
  const auto compared = [](const Fingerprint& f) {
    return std::tuple(f.sequence, f.operation, f.dtype, f.root, f.op, f.count, f.dims, f.of_join(), f.on_gpu, f.shape);
  };
  return compared(a) == compared(b);
}

void Collective::make_dense() {
  const NoGradGuard no_grad;
  const bool in_place = input.defined() && output.defined() && input.identity() == output.identity();
  if (output.defined() && !output.is_contiguous()) view = output;
  if (input.defined()) input = input.contiguous();
  if (output.defined()) output = in_place ? input : output.contiguous();
}

void Collective::finish() {
  if (!output.defined()) return;
  const NoGradGuard no_grad;
  if (view.defined())
    view.copy_(output);
  else
    output.mark_changed();
}

std::string describe(const Fingerprint& f) {
  if (f.of_join()) return fmt::format("join ({}, call {})", pick(kStages, f.stage), f.sequence);
  const std::string call = describe_call(f);
  return f.why().empty() ? call : fmt::format("{} (part of {}, which every rank must call)", call, f.why());
}

}  // namespace tandem::parallel
