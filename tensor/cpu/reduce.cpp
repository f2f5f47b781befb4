// Reductions. Every sum is cut into blocks of a fixed size and added in one order, so that the number of threads never
// changes a bit; blocks are summed in lanes of the element type, blocks together in double (int64 for integers).
#include <vector>

#include <tandem/tensor/cpu/kernels.h>
#include <tandem/tensor/cpu/loops.h>
#include <tandem/tensor/dispatch.h>
#include <tandem/tensor/reduction.h>

namespace tandem::cpu {
namespace {

constexpr std::int64_t kBlock = 1024;
constexpr int kLanes = 16;

template <class R, class T>
TANDEM_CLONES typename R::Acc reduce_block(std::int64_t n, const T* x) {
  typename R::Lane lanes[kLanes];
  for (auto& lane : lanes) lane = static_cast<typename R::Lane>(R::identity());
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] = R::combine(lanes[l], R::load(x[i + l]));
  for (int l = 0; i < n; ++i, ++l) lanes[l] = R::combine(lanes[l], R::load(x[i]));
  typename R::Acc total = R::identity();
  for (const auto lane : lanes) total = R::combine(total, static_cast<typename R::Acc>(lane));
  return total;
}

template <class R, class T>
typename R::Acc reduce_run(std::int64_t n, const T* x, std::int64_t stride) {
  typename R::Acc total = R::identity();
  if (stride == 1) {
    for (std::int64_t i = 0; i < n; i += kBlock)
      total = R::combine(total, reduce_block<R>(std::min(kBlock, n - i), x + i));
  } else {
    for (std::int64_t i = 0; i < n; ++i)
      total = R::combine(total, static_cast<typename R::Acc>(R::load(x[i * stride])));
  }
  return total;
}

template <class R, class T>
TANDEM_CLONES void add_row(std::int64_t n, const T* x, typename R::Acc* acc) {
  for (std::int64_t j = 0; j < n; ++j) acc[j] = R::combine(acc[j], static_cast<typename R::Acc>(R::load(x[j])));
}

template <class T, ReduceKind Kind>
void reduce_typed(const View& x, const View& to) {
  using R = Reducer<T, Kind>;
  using Acc = typename R::Acc;
  const ReduceParts parts(x, to);
  const ReducePart &kept = parts.kept, &reduced = parts.reduced;
  if (kept.count == 0) return;
  const T* source = x.ptr<T>();
  T* target = to.ptr<T>();
  const int inner_dim = reduced.dims - 1;
  const std::int64_t run = reduced.dims > 0 ? reduced.shape[inner_dim] : 1;
  const std::int64_t stride = reduced.dims > 0 ? reduced.x[inner_dim] : 1;
  const std::int64_t runs = run == 0 ? 0 : reduced.count / run;

  if (kept.dims > 0 && kept.x[kept.dims - 1] == 1 && stride != 1 && reduced.count > 0) {
    // Columns: rows are added up side by side, in pieces of columns.
    const int last = kept.dims - 1;
    const std::int64_t width = kept.shape[last], pieces = (width + kBlock - 1) / kBlock;
    const std::int64_t outer = kept.count / width;
    parallel_for(outer * pieces, std::max<std::int64_t>(1, kGrain / (reduced.count * std::min(width, kBlock))),
                 [&](std::int64_t begin, std::int64_t end) {
                   Acc acc[kBlock];
                   for (std::int64_t p = begin; p < end; ++p) {
                     const std::int64_t first = p % pieces * kBlock, n = std::min(kBlock, width - first);
                     const ReducePart::Offsets outside = kept.at(p / pieces, last);
                     const std::int64_t x0 = first + outside.x, to0 = first * kept.to[last] + outside.to;
                     std::fill_n(acc, n, R::identity());
                     for (std::int64_t r = 0; r < reduced.count; ++r) {
                       add_row<R>(n, source + x0 + reduced.at(r, reduced.dims).x, acc);
                     }
                     for (std::int64_t j = 0; j < n; ++j) target[to0 + j * kept.to[last]] = static_cast<T>(acc[j]);
                   }
                 });
    return;
  }
  if (kept.count == 1 && runs == 1 && stride == 1 && run > kGrain) {
    // One long run: partial results of fixed blocks, combined in order.
    constexpr std::int64_t kPart = 16 * kBlock;
    std::vector<Acc> partial(static_cast<std::size_t>((run + kPart - 1) / kPart));
    parallel_for(static_cast<std::int64_t>(partial.size()), 2, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t p = begin; p < end; ++p)
        partial[static_cast<std::size_t>(p)] =
            reduce_run<R>(std::min(kPart, run - p * kPart), source + p * kPart, std::int64_t{1});
    });
    Acc total = R::identity();
    for (const Acc value : partial) total = R::combine(total, value);
    *target = static_cast<T>(total);
    return;
  }
  parallel_for(kept.count, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, reduced.count)),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t k = begin; k < end; ++k) {
                   const ReducePart::Offsets first = kept.at(k, kept.dims);
                   Acc total = R::identity();
                   for (std::int64_t r = 0; r < runs; ++r) {
                     const std::int64_t offset = first.x + reduced.at(r, inner_dim).x;
                     total = R::combine(total, reduce_run<R>(run, source + offset, stride));
                   }
                   target[first.to] = static_cast<T>(total);
                 }
               });
}

}  // namespace

void reduce(ReduceKind kind, const View& x, const View& to) {
  dispatch_number("reduce", x.dtype, [&]<class T>() {
    switch (kind) {
      case ReduceKind::sum:
        return reduce_typed<T, ReduceKind::sum>(x, to);
      case ReduceKind::sum_squares:
        return reduce_typed<T, ReduceKind::sum_squares>(x, to);
      case ReduceKind::max:
        return reduce_typed<T, ReduceKind::max>(x, to);
      case ReduceKind::min:
        return reduce_typed<T, ReduceKind::min>(x, to);
    }
  });
}

void arg_reduce(bool largest, int dim, const View& x, const View& values, const View& indices) {
  dispatch_number("arg_reduce", x.dtype, [&]<class T>() {
    View heads = x;  // the first element along `dim` for each result
    if (x.dims > 0) heads.shape[dim] = 1;
    const std::int64_t n = x.dims > 0 ? x.shape[dim] : 1;
    const auto stride = x.dims > 0 ? x.strides[dim] * static_cast<std::int64_t>(sizeof(T)) : 0;
    for_each_run<3>({&heads, &values, &indices},
                    [=](std::int64_t run, const std::array<char*, 3>& at, const std::array<std::int64_t, 3>& step) {
                      for (std::int64_t i = 0; i < run; ++i) {
                        char* head = at[0] + i * step[0];
                        T best = element<T>(head, 0, stride);
                        std::int64_t where = 0;
                        for (std::int64_t k = 1; k < n && best == best; ++k) {  // the first NaN wins
                          const T value = element<T>(head, k, stride);
                          if (value != value || (largest ? value > best : value < best)) {
                            best = value;
                            where = k;
                          }
                        }
                        element<T>(at[1], i, step[1]) = best;
                        element<std::int64_t>(at[2], i, step[2]) = where;
                      }
                    });
  });
}

}  // namespace tandem::cpu
