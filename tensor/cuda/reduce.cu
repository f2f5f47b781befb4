// Reductions. How a sum is cut depends on the sizes alone, and its pieces are added in one order, so that every run has
// the same bits. Sums are made in double (int64 for integers).
#include <tandem/tensor/cuda/columns.h>
#include <tandem/tensor/cuda/kernels.h>
#include <tandem/tensor/cuda/places.h>
#include <tandem/tensor/dispatch.h>
#include <tandem/tensor/reduction.h>

namespace tandem::cuda {
namespace {

constexpr std::int64_t kShort = 32;  // elements that one thread combines alone

template <class R>
struct Combine {
  template <class V>
  TANDEM_DEVICE V operator()(V a, V b) const {
    return R::combine(a, b);
  }
};

template <class R, class T>
struct Elements {
  ReducePart kept, reduced;
  const T* x;
  T* to;

  // Element `i` of those that go into a result, which begin at `from`.
  TANDEM_DEVICE typename R::Acc load(std::int64_t from, std::int64_t i) const {
    std::int64_t none = 0;
    reduced.at(i, reduced.dims, from, none);
    return static_cast<typename R::Acc>(R::load(x[from]));
  }
};

// One result a thread.
template <class R, class T>
struct ReduceShort {
  Elements<R, T> all;
  TANDEM_DEVICE void operator()(std::int64_t k) const {
    std::int64_t from = 0, at = 0;
    all.kept.at(k, all.kept.dims, from, at);
    typename R::Acc total = R::identity();
    for (std::int64_t i = 0; i < all.reduced.count; ++i) total = R::combine(total, all.load(from, i));
    all.to[at] = static_cast<T>(total);
  }
};

// One result, or one piece of it, a team.
template <class R, class T>
struct ReduceTeam {
  using Acc = typename R::Acc;
  Elements<R, T> all;
  std::int64_t pieces, piece;  // number and elements of each
  Acc* partial;                // when there are several
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t t) const {
    std::int64_t from = 0, at = 0;
    all.kept.at(t / pieces, all.kept.dims, from, at);
    const std::int64_t first = t % pieces * piece, left = all.reduced.count - first;
    const Acc total = team.reduce(left < piece ? left : piece, R::identity(), Combine<R>(),
                                  [&](std::int64_t i) { return all.load(from, first + i); });
    team.once([&] {
      if (partial != nullptr)
        partial[t] = total;
      else
        all.to[at] = static_cast<T>(total);
    });
  }
};

template <class R, class T>
struct CombinePieces {
  using Acc = typename R::Acc;
  ReducePart kept;
  std::int64_t pieces;
  const Acc* partial;
  T* to;
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t k) const {
    std::int64_t from = 0, at = 0;
    kept.at(k, kept.dims, from, at);
    const Acc total =
        team.reduce(pieces, R::identity(), Combine<R>(), [&](std::int64_t i) { return partial[k * pieces + i]; });
    team.once([&] { to[at] = static_cast<T>(total); });
  }
};

// The last kept dimension holds the columns, those before it the matrices.
template <class R, class T>
struct LoadColumn {
  Elements<R, T> all;
  TANDEM_DEVICE typename R::Acc operator()(std::int64_t matrix, std::int64_t row, std::int64_t column) const {
    std::int64_t from = column, at = 0;
    all.kept.at(matrix, all.kept.dims - 1, from, at);
    return all.load(from, row);
  }
};
template <class R, class T>
struct StoreColumn {
  ReducePart kept;
  T* to;
  TANDEM_DEVICE void operator()(std::int64_t matrix, std::int64_t column, typename R::Acc total) const {
    std::int64_t from = 0, at = column * kept.to[kept.dims - 1];
    kept.at(matrix, kept.dims - 1, from, at);
    to[at] = static_cast<T>(total);
  }
};

template <class T, ReduceKind Kind>
void reduce_typed(const View& x, const View& to) {
  using R = Reducer<T, Kind>;
  using Acc = typename R::Acc;
  const ReduceParts parts(x, to);
  const ReducePart &kept = parts.kept, &reduced = parts.reduced;
  if (kept.count == 0) return;
  const cudaStream_t stream = use(to.device);
  const Elements<R, T> all{kept, reduced, x.ptr<const T>(), to.ptr<T>()};
  const std::int64_t stride = reduced.dims > 0 ? reduced.x[reduced.dims - 1] : 1;
  if (kept.dims > 0 && kept.x[kept.dims - 1] == 1 && stride != 1 && reduced.count > 1) {
    const std::int64_t width = kept.shape[kept.dims - 1];
    return combine_columns(to.device, {kept.count / width, reduced.count, width}, R::identity(), Combine<R>(),
                           LoadColumn<R, T>{all}, StoreColumn<R, T>{kept, all.to});
  }
  if (reduced.count <= kShort) return for_each_index(stream, kept.count, ReduceShort<R, T>{all});
  // Where there are few results, each is made of pieces, so that there is work for the whole device.
  constexpr std::int64_t kPiece = 4096, kPieces = 1024, kFewResults = 1024;
  if (reduced.count < 2 * kPiece || kept.count >= kFewResults)
    return for_each_team(stream, kept.count, ReduceTeam<R, T>{all, 1, reduced.count, nullptr});
  const std::int64_t least = (reduced.count + kPieces - 1) / kPieces, piece = least < kPiece ? kPiece : least;
  const std::int64_t pieces = (reduced.count + piece - 1) / piece;
  const Scratch scratch(to.device, static_cast<std::size_t>(kept.count * pieces) * sizeof(Acc));
  auto* const partial = static_cast<Acc*>(scratch.data());
  for_each_team(stream, kept.count * pieces, ReduceTeam<R, T>{all, pieces, piece, partial});
  for_each_team(stream, kept.count, CombinePieces<R, T>{kept, pieces, partial, all.to});
}

// Which of two values is the extreme one; the first NaN wins.
struct Extreme {
  bool largest;
  template <class T>
  TANDEM_DEVICE bool better(T value, T best) const {
    return best == best && (value != value || (largest ? value > best : value < best));
  }
  template <class T>
  TANDEM_DEVICE T operator()(T a, T b) const {
    return better(b, a) ? b : a;
  }
};

template <class T>
struct ArgReduce {
  Places<3> places;  // the first element along the dimension, the value, the index
  std::int64_t n, stride;
  Extreme extreme;

  TANDEM_DEVICE void operator()(std::int64_t k) const {
    char* at[3];
    places.at(k, at);
    T best = value_at<T>(at[0]);
    std::int64_t where = 0;
    for (std::int64_t i = 1; i < n; ++i) {
      const T value = value_at<T>(at[0] + i * stride);
      if (!extreme.better(value, best)) continue;
      best = value;
      where = i;
    }
    value_at<T>(at[1]) = best;
    value_at<std::int64_t>(at[2]) = where;
  }

  // The extreme value, then the first place where it stands.
  TANDEM_DEVICE void operator()(const Team& team, std::int64_t k) const {
    char* at[3];
    places.at(k, at);
    const auto value = [&](std::int64_t i) { return value_at<T>(at[0] + i * stride); };
    const T best = team.reduce(n, value(0), extreme, value);
    const std::int64_t where = team.reduce(n, n, Min(), [&](std::int64_t i) {
      const T v = value(i);
      return v == best || (v != v && best != best) ? i : n;
    });
    team.once([&] {
      value_at<T>(at[1]) = best;
      value_at<std::int64_t>(at[2]) = where;
    });
  }
};

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
  const cudaStream_t stream = use(values.device);
  View heads = x;
  if (x.dims > 0) heads.shape[dim] = 1;
  const std::int64_t n = x.dims > 0 ? x.shape[dim] : 1, stride = x.dims > 0 ? x.strides[dim] : 0;
  dispatch_number("arg_reduce", x.dtype, [&]<class T>() {
    const ArgReduce<T> body{
        places<3>({&heads, &values, &indices}), n, stride * static_cast<std::int64_t>(sizeof(T)), {largest}};
    // Threads side by side read side by side, along the dimension or across it.
    constexpr std::int64_t kManyResults = 4096;
    if (n <= kShort || (stride != 1 && heads.numel() >= kManyResults))
      for_each_index(stream, heads.numel(), body);
    else
      for_each_team(stream, heads.numel(), body);
  });
}

}  // namespace tandem::cuda
