#include <tandem/tensor/create.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <tandem/tensor/backend.h>
#include <tandem/tensor/capture.h>

namespace tandem {
namespace {

// Unsigned, since the distance of two signed integers can overflow.
std::uint64_t wrapped(int64_t value) { return static_cast<std::uint64_t>(value); }

DType default_dtype(Scalar value) { return value.dtype() == float64 ? float32 : value.dtype(); }

Tensor finish(Tensor t, const TensorOptions& options) {
  if (options.requires_grad) t.requires_grad_();
  return t;
}

// Values computed on the host as `dtype`, then converted and moved to what the options ask for.
Tensor from_host(const Tensor& host, const TensorOptions& options) {
  return finish(host.to(options.dtype.value_or(host.dtype())).to(options.device), options);
}

Tensor random(std::string_view op, RandomKind kind, double low, double high, const Shape& shape,
              const TensorOptions& options, DType default_type) {
  const DType dtype = options.dtype.value_or(default_type);
  if (kind != RandomKind::integers)
    check(is_real(dtype), op, "makes float32 or float64, not {}; draw float32 and convert with .to()", dtype);
  Tensor t = empty(shape, {.dtype = dtype, .device = options.device});
  const int64_t per_block = dtype == float32 ? 4 : 2;
  const PhiloxKey key = draw(static_cast<std::uint64_t>((t.numel() + per_block - 1) / per_block));
  const Backend& table = backend(t.device());
  if (t.numel() > 0) kernel("random", table, table.random)(kind, low, high, key, t.raw_for_write());
  return finish(t, options);
}

}  // namespace

Tensor empty(const Shape& shape, const TensorOptions& options) {
  check_exists("empty", options.device);
  const DType dtype = options.dtype.value_or(float32);
  const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
  auto storage = std::make_shared<Storage>(bytes, options.device);
  return finish(make_view(std::move(storage), 0, shape, contiguous_strides(shape), dtype), options);
}

Tensor zeros(const Shape& shape, const TensorOptions& options) {
  return full(shape, 0, {options.dtype.value_or(float32), options.device, options.requires_grad});
}
Tensor ones(const Shape& shape, const TensorOptions& options) {
  return full(shape, 1, {options.dtype.value_or(float32), options.device, options.requires_grad});
}

Tensor full(const Shape& shape, Scalar value, const TensorOptions& options) {
  Tensor t = empty(shape, {.dtype = options.dtype.value_or(default_dtype(value)), .device = options.device});
  const Backend& table = backend(t.device());
  kernel("fill", table, table.fill)(t.raw_for_write(), value);
  return finish(t, options);
}

Tensor arange(Scalar end, const TensorOptions& options) { return arange(0, end, 1, options); }

Tensor arange(Scalar start, Scalar end, Scalar step, const TensorOptions& options) {
  check(step.real() != 0, "arange", "step is 0; give a step that leads from {} to {}", start.real(), end.real());
  const bool real = start.dtype() == float64 || end.dtype() == float64 || step.dtype() == float64;
  const int64_t first = start.to<int64_t>(), last = end.to<int64_t>(), by = step.to<int64_t>();
  const double span = (end.real() - start.real()) / step.real();
  const bool leads = real ? span >= 0 : first == last || (first < last) == (by > 0);
  check(leads, "arange", "step {} does not lead from {} to {}; change its sign", step.real(), start.real(), end.real());
  check(span < 9e15, "arange", "there are too many numbers from {} to {}; use a larger step", start.real(), end.real());
  auto count = static_cast<int64_t>(std::ceil(span));
  if (!real) {  // exactly, also where a double cannot hold the ends
    const std::uint64_t distance = by > 0 ? wrapped(last) - wrapped(first) : wrapped(first) - wrapped(last);
    const std::uint64_t size = by > 0 ? wrapped(by) : 0 - wrapped(by);
    count = static_cast<int64_t>(distance / size + (distance % size != 0));
  }
  Tensor counted = empty({count}, {.dtype = real ? float64 : int64, .device = options.device});
  const Backend& table = backend(options.device);
  kernel("arange", table, table.arange)(start, step, counted.raw_for_write());
  return finish(counted.to(options.dtype.value_or(real ? float32 : int64)), options);
}

Tensor eye(int64_t n, const TensorOptions& options) {
  Tensor t = zeros({n, n}, {.dtype = options.dtype, .device = options.device});
  View diagonal = t.raw_for_write();
  diagonal.dims = 1;
  diagonal.strides[0] = n + 1;
  backend(t.device()).fill(diagonal, 1);
  return finish(t, options);
}

Tensor empty_like(const Tensor& x) { return empty(x.shape(), {.dtype = x.dtype(), .device = x.device()}); }
Tensor zeros_like(const Tensor& x) { return zeros(x.shape(), {.dtype = x.dtype(), .device = x.device()}); }
Tensor ones_like(const Tensor& x) { return ones(x.shape(), {.dtype = x.dtype(), .device = x.device()}); }
Tensor full_like(const Tensor& x, Scalar v) { return full(x.shape(), v, {.dtype = x.dtype(), .device = x.device()}); }
Tensor rand_like(const Tensor& x) { return rand(x.shape(), {.dtype = x.dtype(), .device = x.device()}); }
Tensor randn_like(const Tensor& x) { return randn(x.shape(), {.dtype = x.dtype(), .device = x.device()}); }

Tensor tensor(const Nested& values, const TensorOptions& options) {
  // One walk finds the shape, the type, and the numbers in order.
  Shape shape;
  bool any_real = false, all_bool = true;
  std::vector<Scalar> flat;
  for (const Nested* level = &values; level->is_list_; level = &level->items_.front()) {
    shape.push_back(static_cast<int64_t>(level->items_.size()));
    if (level->items_.empty()) break;
  }
  auto walk = [&](auto& self, const Nested& node, int depth) -> void {
    check(node.is_list_ == (depth < shape.dim()) &&
              (!node.is_list_ || static_cast<int64_t>(node.items_.size()) == shape[depth]),
          "tensor", "the lists have different lengths at depth {}; every list at one depth needs {} entries", depth,
          depth < shape.dim() ? shape[depth] : 0);
    if (!node.is_list_) {
      flat.push_back(node.value_);
      any_real |= node.value_.dtype() == float64;
      all_bool &= node.value_.dtype() == boolean;
      return;
    }
    for (const Nested& item : node.items_) self(self, item, depth + 1);
  };
  walk(walk, values, 0);
  const DType dtype = any_real || flat.empty() ? float32 : all_bool ? boolean : int64;
  const DType wanted = options.dtype.value_or(dtype);
  const bool exact_integers = !any_real && !is_floating(wanted);
  Tensor host = empty(shape, {.dtype = exact_integers ? int64 : float64});
  if (exact_integers) {
    std::transform(flat.begin(), flat.end(), host.data<int64_t>(), [](Scalar s) { return s.to<int64_t>(); });
  } else {
    std::transform(flat.begin(), flat.end(), host.data<double>(), [](Scalar s) { return s.real(); });
  }
  return from_host(host, {wanted, options.device, options.requires_grad});
}

namespace detail {

Tensor copy_values(const void* values, std::size_t count, DType dtype, const Shape& shape,
                   const TensorOptions& options) {
  check(shape.numel() == static_cast<int64_t>(count), "from_span", "{} values do not fill the shape {}", count, shape);
  Tensor host = empty(shape, {.dtype = dtype});
  if (count > 0)
    std::copy_n(static_cast<const char*>(values), count * size_of(dtype),
                static_cast<char*>(host.raw_for_write().data));
  return from_host(host, options);
}

}  // namespace detail

Tensor rand(const Shape& shape, const TensorOptions& options) {
  return random("rand", RandomKind::uniform, 0, 1, shape, options, float32);
}
Tensor randn(const Shape& shape, const TensorOptions& options) {
  return random("randn", RandomKind::normal, 0, 1, shape, options, float32);
}
Tensor randint(int64_t low, int64_t high, const Shape& shape, const TensorOptions& options) {
  check(low < high, "randint", "there is no integer from {} (inclusive) to {} (exclusive); give low < high", low, high);
  constexpr int64_t kLimit = int64_t{1} << 53;
  check(low >= -kLimit && high <= kLimit, "randint", "{} to {} is out of range; give bounds within 2^53", low, high);
  const DType dtype = options.dtype.value_or(int64);
  if (dtype == uint8 || dtype == int32) {
    const int64_t least = dtype == uint8 ? 0 : std::numeric_limits<std::int32_t>::min();
    const int64_t most = dtype == uint8 ? 255 : std::numeric_limits<std::int32_t>::max();
    check(low >= least && high - 1 <= most, "randint", "{} does not hold all integers from {} to {}; use int64", dtype,
          low, high - 1);
  }
  return random("randint", RandomKind::integers, static_cast<double>(low), static_cast<double>(high), shape, options,
                int64);
}

Tensor randperm(int64_t n, const TensorOptions& options) {
  check(n >= 0, "randperm", "n is {}; it must not be negative", n);
  check(options.device.is_cpu() || !cuda::capturing(), "randperm",
        "an order is made on the host and copied, which a graph cannot capture; make it before, and copy_ a new one "
        "into it before each replay");
  Tensor host = arange(n);
  int64_t* p = host.data<int64_t>();
  const PhiloxKey key = draw(static_cast<std::uint64_t>(n));
  for (int64_t i = n - 1; i > 0; --i) {  // Fisher and Yates, one block of random bits a swap
    const Philox4 bits = philox(key, static_cast<std::uint64_t>(i));
    const std::uint64_t r = (std::uint64_t{bits.x[1]} << 32) | bits.x[0];
    std::swap(p[i], p[static_cast<int64_t>(r % static_cast<std::uint64_t>(i + 1))]);
  }
  return from_host(host, options);
}

}  // namespace tandem
