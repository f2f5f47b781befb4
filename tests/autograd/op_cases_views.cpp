// Rows of the views and copies. A view's reference says which element of the input each element of the result is.
#include <tandem/tests/autograd/op_cases.h>

#include <algorithm>
#include <numeric>

namespace tandem::test {
namespace {

using Index = std::vector<int64_t>;

std::size_t at(int d) { return static_cast<std::size_t>(d); }

// A row whose result element `index` is the input's element source(index). The result is multiplied by itself, so that
// the gradient depends on the position.
Example moved(const Shape& from, const Shape& to, std::function<Tensor(const Tensor&)> function,
              std::function<Index(const Index&)> source) {
  return {{{from}},
          [=](const auto& in) {
            const Tensor y = function(in[0]);
            return y * y;
          },
          [=](const auto& in) {
            Array y(to);
            for_each_index(
                to, [&](const Index& index) { y.at(index) = in[0].at(source(index)) * in[0].at(source(index)); });
            return y;
          }};
}

// The same elements in the same order in another shape.
Example rearranged(const Shape& from, const Shape& to, std::function<Tensor(const Tensor&)> function) {
  return moved(from, to, std::move(function), [=](const Index& index) {
    int64_t flat = 0;
    for (std::size_t i = 0; i < index.size(); ++i) flat = flat * to[static_cast<int>(i)] + index[i];
    Index source(from.size());
    for (int d = from.dim() - 1; d >= 0; --d) {
      source[at(d)] = flat % from[d];
      flat /= from[d];
    }
    return source;
  });
}

Shape join_dims(const Shape& shape, int first, int last) {
  Shape joined;
  for (int d = 0; d < shape.dim(); ++d) {
    if (d > first && d <= last)
      joined[joined.dim() - 1] *= shape[d];
    else
      joined.push_back(shape[d]);
  }
  return joined;
}

OpCase reshape_case(const char* name, bool view) {
  return {name, [=](Sizes& s) {
            const Shape from = s.shape(0, 4);
            Shape to = from.dim() == 0
                           ? Shape{1}
                           : join_dims(from, static_cast<int>(s.between(0, from.dim() - 1)), from.dim() - 1);
            if (s.flip()) to.insert(static_cast<int>(s.between(0, to.dim())), 1);
            Shape asked = to;
            const int d = static_cast<int>(s.between(0, to.dim() - 1));
            if (to.numel() > 0) asked[d] = -1;
            return rearranged(from, to,
                              [=](const Tensor& x) { return view ? x.contiguous().view(asked) : x.reshape(asked); });
          }};
}

OpCase flatten_case() {
  return {"flatten", [](Sizes& s) {
            const Shape from = s.shape(0, 4);
            if (from.dim() == 0) return rearranged(from, {1}, [](const Tensor& x) { return x.flatten(); });
            const int first = static_cast<int>(s.between(0, from.dim() - 1)),
                      last = static_cast<int>(s.between(first, from.dim() - 1));
            return rearranged(from, join_dims(from, first, last),
                              [=](const Tensor& x) { return x.flatten(first, last - from.dim()); });
          }};
}

OpCase permute_case(const char* name, int kind) {  // 0: permute, 1: transpose, 2: t
  return {name, [=](Sizes& s) {
            const Shape from = kind == 2 ? s.shape(2, 2) : s.shape(1, 4);
            Shape order = from;
            std::iota(order.begin(), order.end(), 0);
            int a = 0, b = 1;
            if (kind == 0) {
              for (int i = order.dim() - 1; i > 0; --i) std::swap(order[i], order[static_cast<int>(s.between(0, i))]);
            } else {
              if (kind == 1) {
                a = static_cast<int>(s.between(0, from.dim() - 1));
                b = static_cast<int>(s.between(0, from.dim() - 1));
              }
              std::swap(order[a], order[b]);
            }
            Shape to = from;
            for (int i = 0; i < from.dim(); ++i) to[i] = from[static_cast<int>(order[i])];
            return moved(
                from, to,
                [=](const Tensor& x) {
                  return kind == 0 ? x.permute(order) : kind == 1 ? x.transpose(a, b - from.dim()) : x.t();
                },
                [=](const Index& index) {
                  Index source(index.size());
                  for (int i = 0; i < order.dim(); ++i) source[at(static_cast<int>(order[i]))] = index[at(i)];
                  return source;
                });
          }};
}

// A part of one dimension: every `step`-th element from `start` on.
Example part_of(const Shape& from, int d, int64_t start, int64_t length, int64_t step,
                std::function<Tensor(const Tensor&)> function) {
  Shape to = from;
  to[d] = length;
  return moved(from, to, std::move(function), [=](Index index) {
    index[at(d)] = start + index[at(d)] * step;
    return index;
  });
}

OpCase narrow_case() {
  return {"narrow", [](Sizes& s) {
            const Shape from = s.shape(1, 3);
            const int d = static_cast<int>(s.between(0, from.dim() - 1));
            const int64_t start = s.between(0, from[d]), length = s.between(0, from[d] - start);
            return part_of(from, d, start, length, 1,
                           [=](const Tensor& x) { return x.narrow(d - from.dim(), start, length); });
          }};
}

OpCase slice_case() {
  return {"slice", [](Sizes& s) {
            const Shape from = s.shape(1, 3);
            const int d = static_cast<int>(s.between(0, from.dim() - 1));
            const int64_t start = s.between(-from[d] - 1, from[d] + 1), end = s.between(-from[d] - 1, from[d] + 1),
                          step = s.between(1, 3);
            // As Python slices: negative bounds count from the end, then both are limited to the dimension.
            auto bound = [size = from[d]](int64_t i) { return std::clamp<int64_t>(i < 0 ? i + size : i, 0, size); };
            const int64_t length = std::max<int64_t>(0, (bound(end) - bound(start) + step - 1) / step);
            return part_of(from, d, bound(start), length, step,
                           [=](const Tensor& x) { return x.slice(d, start, end, step); });
          }};
}

OpCase select_case() {
  return {"select", [](Sizes& s) {
            Shape from = s.shape(1, 3);
            const int d = static_cast<int>(s.between(0, from.dim() - 1));
            from[d] = s.positive();
            const int64_t chosen = s.between(0, from[d] - 1);
            Shape to = from;
            to.erase(d);
            return moved(
                from, to, [=](const Tensor& x) { return x.select(d, chosen - from[d]); },
                [=](Index index) {
                  index.insert(index.begin() + d, chosen);
                  return index;
                });
          }};
}

OpCase expand_case() {
  return {"expand", [](Sizes& s) {
            const Shape to = s.shape(0, 4);
            Shape asked = to;
            const Shape from = s.broadcastable(to);
            const int added = to.dim() - from.dim();
            for (int d = 0; d < from.dim(); ++d)
              if (from[d] == to[added + d] && s.flip()) asked[added + d] = -1;
            return moved(
                from, to, [=](const Tensor& x) { return x.expand(asked); },
                [=](const Index& index) { return Index(index.begin() + added, index.end()); });
          }};
}

OpCase squeeze_case(const char* name, bool one_dim) {
  return {name, [=](Sizes& s) {
            Shape from = s.shape(1, 3);
            for (int d = 0; d < from.dim(); ++d)
              if (s.flip()) from[d] = 1;
            const int dim = static_cast<int>(s.between(0, from.dim() - 1));
            Shape to;
            for (int d = 0; d < from.dim(); ++d)
              if (from[d] != 1 || (one_dim && d != dim)) to.push_back(from[d]);
            return rearranged(from, to, [=](const Tensor& x) { return one_dim ? x.squeeze(dim) : x.squeeze(); });
          }};
}

OpCase unsqueeze_case() {
  return {"unsqueeze", [](Sizes& s) {
            const Shape from = s.shape(0, 3);
            const int d = static_cast<int>(s.between(0, from.dim()));
            Shape to = from;
            to.insert(d, 1);
            return rearranged(from, to, [=](const Tensor& x) { return x.unsqueeze(d - from.dim() - 1); });
          }};
}

// One of the parts that chunk or split gives.
OpCase split_case(const char* name, int kind) {  // 0: chunk, 1: split by a size, 2: by sizes
  return {name, [=](Sizes& s) {
            Shape from = s.shape(1, 3);
            const int d = static_cast<int>(s.between(0, from.dim() - 1));
            from[d] = s.between(1, 7);
            const int64_t n = s.between(1, 4);
            std::vector<int64_t> sizes;
            if (kind == 2) {
              for (int64_t rest = from[d]; rest > 0; rest -= sizes.back()) sizes.push_back(s.between(0, rest));
            } else {
              const int64_t each = kind == 0 ? (from[d] + n - 1) / n : n;
              for (int64_t rest = from[d]; rest > 0; rest -= each) sizes.push_back(std::min(each, rest));
            }
            const auto chosen = static_cast<std::size_t>(s.between(0, static_cast<int64_t>(sizes.size()) - 1));
            const int64_t start =
                std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(chosen), int64_t{0});
            return part_of(from, d, start, sizes[chosen], 1, [=](const Tensor& x) {
              const auto parts = kind == 0 ? x.chunk(n, d) : kind == 1 ? x.split(n, d) : x.split(sizes, d);
              check(parts.size() == sizes.size(), "split", "{} parts, {} were expected", parts.size(), sizes.size());
              return parts[chosen];
            });
          }};
}

OpCase copy_case(const char* name, std::function<Tensor(const Tensor&)> function) {
  return {name, [=](Sizes& s) {
            const Shape shape = s.shape(0, 4);
            return rearranged(shape, shape, function);
          }};
}

// There and back. The steps must be visible in float32.
OpCase to_dtype_case() {
  return {"to_dtype", [](Sizes& s) {
            const Shape shape = s.shape(0, 4);
            Example example = rearranged(shape, shape, [](const Tensor& x) {
              return x.to(x.dtype() == float64 ? float32 : float64).to(x.dtype());
            });
            example.step = 0.01;
            example.tolerance = 1e-3;
            return example;
          }};
}

}  // namespace

std::vector<OpCase> view_cases() {
  return {reshape_case("view", true),
          reshape_case("reshape", false),
          flatten_case(),
          permute_case("permute", 0),
          permute_case("transpose", 1),
          permute_case("t", 2),
          narrow_case(),
          slice_case(),
          select_case(),
          expand_case(),
          squeeze_case("squeeze", false),
          squeeze_case("squeeze_dim", true),
          unsqueeze_case(),
          split_case("chunk", 0),
          split_case("split", 1),
          split_case("split_sizes", 2),
          copy_case("clone", [](const Tensor& x) { return x.clone(); }),
          copy_case("contiguous", [](const Tensor& x) { return x.contiguous(); }),
          to_dtype_case(),
          copy_case("to_device", [](const Tensor& x) {
            return x.to(Device(DeviceType::cpu, 1 - x.device().index())).to(x.device());
          })};
}

}  // namespace tandem::test
