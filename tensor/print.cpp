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
constexpr int kLineWidth = 80;

// How every number of the tensor is written, so that columns align.
struct NumberFormat {
  DType dtype = float32;
  bool integral_reals = true, scientific = false;
  int width = 1;

  std::string text(const Tensor& x) const {
    if (dtype == boolean) return x.item<bool>() ? "true" : "false";
    return is_integral(dtype) ? fmt::format("{}", x.item<int64_t>()) : text(x.item<double>());
  }
  std::string text(double v) const {
    if (!std::isfinite(v)) return std::isnan(v) ? "nan" : v > 0 ? "inf" : "-inf";
    if (scientific) return fmt::format("{:.{}e}", v, kPrecision);
    return integral_reals ? fmt::format("{:.0f}.", v) : fmt::format("{:.{}f}", v, kPrecision);
  }
};

// The indices of a dimension that are shown; -1 stands for the dots.
std::vector<int64_t> places_shown(int64_t size, bool shorten) {
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
  for (const int64_t i : places_shown(t.size(0), shorten))
    if (i >= 0) for_each_shown(t[i], shorten, visit);
}

NumberFormat number_format(const Tensor& t, bool shorten) {
  NumberFormat f{.dtype = t.dtype()};
  const bool real = is_floating(t.dtype());
  // Zeros and what is not finite are written in the format that the others need.
  auto counts = [&](const Tensor& x) { return !real || (std::isfinite(x.item<double>()) && x.item<double>() != 0); };
  double largest = 0, smallest = INFINITY;
  for_each_shown(t, shorten, [&](const Tensor& x) {
    if (!real || !counts(x)) return;
    const double v = x.item<double>();
    f.integral_reals &= v == std::floor(v);
    largest = std::max(largest, std::abs(v));
    smallest = std::min(smallest, std::abs(v));
  });
  f.scientific =
      largest > 0 && (largest / smallest > 1000.0 || largest > 1e8 || (!f.integral_reals && smallest < 1e-4));
  for_each_shown(t, shorten, [&](const Tensor& x) {
    if (counts(x)) f.width = std::max(f.width, static_cast<int>(f.text(x).size()));
  });
  return f;
}

std::string vector_text(const Tensor& t, const NumberFormat& f, bool shorten, int indent) {
  const std::size_t per_line = static_cast<std::size_t>(std::max(1, (kLineWidth - indent) / (f.width + 2)));
  std::string text = "[";
  std::size_t entries = 0;
  for (const int64_t i : places_shown(t.size(0), shorten)) {
    if (entries > 0)
      text += entries % per_line == 0 ? ",\n" + std::string(static_cast<std::size_t>(indent + 1), ' ') : ", ";
    text += i < 0 ? " ..." : fmt::format("{:>{}}", f.text(t[i]), f.width);
    ++entries;
  }
  return text + "]";
}

std::string rows(const Tensor& t, const NumberFormat& f, bool shorten, int indent) {
  if (t.dim() == 0) return f.text(t);
  if (t.dim() == 1) return vector_text(t, f, shorten, indent);
  const std::string separator = "," + std::string(static_cast<std::size_t>(t.dim() - 1), '\n') +
                                std::string(static_cast<std::size_t>(indent + 1), ' ');
  std::string text = "[";
  for (const int64_t i : places_shown(t.size(0), shorten)) {
    if (text.size() > 1) text += separator;
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
  } else {
    const bool shorten = t.numel() > kThreshold;
    text += rows(t, number_format(t, shorten), shorten, static_cast<int>(kPrefix.size()));
  }
  // What is worth knowing beside the values, on a line of its own where the last one is full.
  auto add = [&](const std::string& suffix) {
    const std::size_t line = text.size() - (text.rfind('\n') + 1);
    const bool fits = line + suffix.size() + 4 <= kLineWidth;
    text += (fits ? ", " : ",\n" + std::string(kPrefix.size(), ' ')) + suffix;
  };
  if (t.numel() == 0 && t.dim() != 1) add(fmt::format("size={}", t.shape()));
  if (device() != Device()) add(fmt::format("device='{}'", device()));
  const bool shown_by_values = t.numel() > 0 && (dtype() == int64 || dtype() == boolean);
  if (dtype() != float32 && !shown_by_values) add(fmt::format("dtype={}", dtype()));
  if (requires_grad()) add(is_leaf() ? "requires_grad=true" : "grad_fn=<recorded>");
  return text + ")";
}

}  // namespace tandem
