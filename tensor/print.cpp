// Printing tensors as PyTorch does: aligned columns, large tensors shortened.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <tandem/tensor/tensor.h>

namespace tandem {
namespace {

constexpr int64_t kThreshold = 1000;  // more elements than this are shortened
constexpr int64_t kEdge = 3;          // to this many at each end of a dimension
constexpr int kPrecision = 4;

// How every number of the tensor is written, so that columns align.
struct NumberFormat {
  bool real = false, integral_reals = true, scientific = false, boolean_type = false;
  int width = 0;

  std::string plain(double v) const {
    if (boolean_type) return v != 0 ? "true" : "false";
    if (!real) return fmt::format("{}", static_cast<int64_t>(v));
    if (!std::isfinite(v)) return std::isnan(v) ? "nan" : v > 0 ? "inf" : "-inf";
    if (integral_reals) return fmt::format("{:.0f}.", v);
    return scientific ? fmt::format("{:.{}e}", v, kPrecision) : fmt::format("{:.{}f}", v, kPrecision);
  }
};

// The indices of a dimension that are shown; -1 stands for the dots.
std::vector<int64_t> shown(int64_t size, bool shorten) {
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < size; ++i) {
    if (shorten && size > 2 * kEdge && i == kEdge) {
      indices.push_back(-1);
      i = size - kEdge;
    }
    indices.push_back(i);
  }
  return indices;
}

template <class Visit>
void for_each_shown(const Tensor& t, bool shorten, const Visit& visit) {
  if (t.dim() == 0) return visit(t);
  for (const int64_t i : shown(t.size(0), shorten))
    if (i >= 0) for_each_shown(t[i], shorten, visit);
}

NumberFormat number_format(const Tensor& t, bool shorten) {
  NumberFormat f;
  f.real = is_floating(t.dtype());
  f.boolean_type = t.dtype() == boolean;
  double largest = 0, smallest = INFINITY;
  for_each_shown(t, shorten, [&](const Tensor& x) {
    const double v = x.item<double>();
    if (!f.real || !std::isfinite(v)) return;
    f.integral_reals &= v == std::floor(v);
    if (v == 0) return;
    largest = std::max(largest, std::abs(v));
    smallest = std::min(smallest, std::abs(v));
  });
  if (f.real && largest > 0) {
    if (f.integral_reals) f.integral_reals = largest < 1e8;
    f.scientific = !f.integral_reals && (largest / smallest > 1000.0 || largest > 1e8 || smallest < 1e-4);
  }
  for_each_shown(t, shorten, [&](const Tensor& x) {
    f.width = std::max(f.width, static_cast<int>(f.plain(x.item<double>()).size()));
  });
  return f;
}

std::string number(const Tensor& x, const NumberFormat& f) {
  if (is_integral(x.dtype())) return fmt::format("{:>{}}", x.item<int64_t>(), f.width);
  return fmt::format("{:>{}}", f.plain(x.item<double>()), f.width);
}

std::string rows(const Tensor& t, const NumberFormat& f, bool shorten, int indent) {
  if (t.dim() == 0) return number(t, f);
  const bool last = t.dim() == 1;
  const std::string separator = last ? ", " : "," + std::string(static_cast<std::size_t>(t.dim() - 1), '\n') +
                                                  std::string(static_cast<std::size_t>(indent + 1), ' ');
  std::string text = "[";
  bool first = true;
  for (const int64_t i : shown(t.size(0), shorten)) {
    if (!first) text += separator;
    first = false;
    text += i < 0 ? "..." : rows(t[i], f, shorten, indent + 1);
  }
  return text + "]";
}

}  // namespace

std::string Tensor::str() const {
  if (!defined()) return "tensor(undefined)";
  Tensor t = detach();
  if (!t.device().is_cpu()) t = t.to(Device());
  constexpr std::string_view kPrefix = "tensor(";
  std::string text(kPrefix);
  if (t.numel() == 0) {
    text += "[]";
    if (t.dim() != 1) text += fmt::format(", size={}", t.shape());
  } else {
    const bool shorten = t.numel() > kThreshold;
    text += rows(t, number_format(t, shorten), shorten, static_cast<int>(kPrefix.size()));
  }
  if (dtype() != float32 && dtype() != int64 && dtype() != boolean) text += fmt::format(", dtype={}", dtype());
  if (device() != Device()) text += fmt::format(", device='{}'", device());
  if (requires_grad()) text += is_leaf() ? ", requires_grad=true" : ", grad_fn=<recorded>";
  return text + ")";
}

}  // namespace tandem
