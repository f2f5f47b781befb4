#include <tandem/tests/parallel/collective_cases.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include <tandem/autograd/functions.h>
#include <tandem/tensor/create.h>

namespace tandem::test {

using parallel::ReduceOp;
using parallel::Work;

void require(bool ok, std::string_view what) { check(ok, "test", "does not hold: {}", what); }

Tensor values_of(int rank, std::int64_t count, DType dtype, int salt) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto k =
        static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13 + static_cast<std::size_t>(salt)) % 11);
    values[i] = is_floating(dtype) ? (k - 5) / 3.0 + 0.1 : dtype == boolean ? k % 2 : dtype == uint8 ? k * 20 : k - 5;
  }
  return from_span(std::span<const double>(values)).to(dtype);
}

namespace {

template <class T>
double wide(T a) {
  return static_cast<double>(a);
}

// Written down as the documentation has it, one element at a time.
template <class T>
T tree(const std::vector<T>& v, std::size_t lo, std::size_t hi, ReduceOp op) {
  if (hi - lo == 1) return v[lo];
  const std::size_t middle = lo + (hi - lo + 1) / 2;
  const T a = tree(v, lo, middle, op), b = tree(v, middle, hi, op);
  switch (op) {
    case ReduceOp::product:
      return static_cast<T>(a * b);
    case ReduceOp::min:
      return std::min(a, b);
    case ReduceOp::max:
      return std::max(a, b);
    default:
      return static_cast<T>(a + b);
  }
}

template <class T, class W>
void combine_elements(const std::vector<Tensor>& parts, ReduceOp op, Tensor& out) {
  T* to = static_cast<T*>(out.raw_for_write().data);
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    std::vector<W> values;
    for (const Tensor& p : parts) values.push_back(static_cast<W>(static_cast<const T*>(p.raw().data)[i]));
    W value = tree(values, 0, values.size(), op);
    if (op == ReduceOp::avg) value = static_cast<W>(value / static_cast<W>(parts.size()));
    to[i] = static_cast<T>(value);
  }
}

std::vector<Tensor> inputs_of(int ranks, std::int64_t count, DType dtype, int salt) {
  std::vector<Tensor> result;
  for (int r = 0; r < ranks; ++r) result.push_back(values_of(r, count, dtype, salt));
  return result;
}

Tensor joined(const std::vector<Tensor>& parts) {
  Tensor whole = empty({static_cast<std::int64_t>(parts.size()), parts[0].numel()}, {.dtype = parts[0].dtype()});
  for (std::size_t i = 0; i < parts.size(); ++i) whole[static_cast<std::int64_t>(i)].copy_(parts[i]);
  return whole;
}

std::vector<ReduceOp> operations_for(DType dtype) {
  if (dtype == boolean) return {ReduceOp::min, ReduceOp::max};
  std::vector<ReduceOp> result{ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max};
  if (is_floating(dtype)) result.push_back(ReduceOp::avg);
  return result;
}

void moves(parallel::ProcessGroup& group, DType dtype, std::int64_t count, int salt) {
  const int n = group.size(), me = group.rank();
  const std::vector<Tensor> all = inputs_of(n, count, dtype, salt);
  const Tensor mine = all[static_cast<std::size_t>(me)].clone(), whole = joined(all);
  Tensor gathered = empty({n, count}, {.dtype = dtype});
  group.all_gather(gathered, mine).wait();
  require(same_bits(gathered, whole), "all_gather");
  for (int root = 0; root < n; ++root) {
    Tensor t = mine.clone();
    group.broadcast(t, root).wait();
    require(same_bits(t, all[static_cast<std::size_t>(root)]), "broadcast");
    Tensor output = me == root ? empty({n * count}, {.dtype = dtype}) : Tensor();
    group.gather(output, mine, root).wait();
    require(me != root || same_bits(output, whole.view({n * count})), "gather");
    Tensor part = empty({count}, {.dtype = dtype});
    group.scatter(part, me == root ? whole : Tensor(), root).wait();
    require(same_bits(part, mine), "scatter");
  }
  require(same_bits(mine, all[static_cast<std::size_t>(me)]), "inputs stay as they are");
}

// A rank's own part may be where it goes or comes from.
void in_place(parallel::ProcessGroup& group, DType dtype, std::int64_t count, int salt) {
  const int n = group.size(), me = group.rank();
  const std::vector<Tensor> all = inputs_of(n, count, dtype, salt);
  const Tensor mine = all[static_cast<std::size_t>(me)].clone(), whole = joined(all);
  for (Tensor place : {empty({n, count}, {.dtype = dtype}), group.allocate({n, count}, dtype)}) {
    Tensor own = place[me];
    own.copy_(mine);
    group.all_gather(place, own).wait();
    require(same_bits(place, whole), "all_gather in place");
    for (int root = 0; root < n; ++root) {
      place.zero_();
      own.copy_(mine);
      group.gather(place, own, root).wait();
      require(me == root ? same_bits(place, whole) : same_bits(own, mine), "gather in place");
      place.copy_(whole);
      group.scatter(own, me == root ? place : Tensor(), root).wait();
      require(same_bits(place, whole), "scatter in place");
    }
    std::vector<Tensor> own_parts;
    for (int r = 0; r < n; ++r) own_parts.push_back(values_of(r, count * n, dtype).narrow(0, me * count, count));
    for (const ReduceOp op : operations_for(dtype)) {
      place.copy_(values_of(me, count * n, dtype).view({n, count}));
      group.reduce_scatter(own, place, op).wait();
      require(same_bits(own, combined(own_parts, op)), "reduce_scatter in place");
    }
  }
}

void combinations(parallel::ProcessGroup& group, DType dtype, std::int64_t count, int salt) {
  const int n = group.size(), me = group.rank();
  const std::vector<Tensor> all = inputs_of(n, count, dtype, salt), wide = inputs_of(n, count * n, dtype, salt + 1);
  Tensor shared = group.allocate({count + 3}, dtype).narrow(0, count > 0 ? 3 : 0, count);
  const void* const address = shared.raw().data;
  std::vector<Tensor> own_parts;
  for (const Tensor& w : wide) own_parts.push_back(w.narrow(0, me * count, count));
  for (const ReduceOp op : operations_for(dtype)) {
    const Tensor expected = combined(all, op);
    Tensor t = all[static_cast<std::size_t>(me)].clone();
    group.all_reduce(t, op).wait();
    require(same_bits(t, expected), "all_reduce");
    shared.copy_(all[static_cast<std::size_t>(me)]);
    group.all_reduce(shared, op).wait();
    require(same_bits(shared, expected) && shared.raw().data == address, "all_reduce in allocated memory");
    const int root = salt % n;
    Tensor r = all[static_cast<std::size_t>(me)].clone();
    group.reduce(r, root, op).wait();
    require(same_bits(r, me == root ? expected : all[static_cast<std::size_t>(me)]), "reduce");
    Tensor part = empty({count}, {.dtype = dtype});
    group.reduce_scatter(part, wide[static_cast<std::size_t>(me)], op).wait();
    require(same_bits(part, combined(own_parts, op)), "reduce_scatter");
  }
}

}  // namespace

Tensor combined(const std::vector<Tensor>& parts, ReduceOp op) {
  Tensor out = empty(parts[0].shape(), {.dtype = parts[0].dtype()});
  switch (out.dtype()) {
    case DType::float32:
      combine_elements<float, float>(parts, op, out);
      break;
    case DType::float64:
      combine_elements<double, double>(parts, op, out);
      break;
    case DType::int64:
      combine_elements<std::int64_t, std::int64_t>(parts, op, out);
      break;
    case DType::int32:
      combine_elements<std::int32_t, std::int32_t>(parts, op, out);
      break;
    case DType::uint8:
      combine_elements<std::uint8_t, std::uint8_t>(parts, op, out);
      break;
    case DType::boolean:
      combine_elements<std::uint8_t, std::uint8_t>(parts, op, out);
      break;
    case DType::bfloat16:
      combine_elements<BFloat16, float>(parts, op, out);
      break;
    case DType::float16:
      combine_elements<Float16, float>(parts, op, out);
      break;
  }
  return out;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.contiguous(), y = b.contiguous();
  return x.shape() == y.shape() && x.dtype() == y.dtype() &&
         (x.numel() == 0 ||
          std::memcmp(x.raw().data, y.raw().data, static_cast<std::size_t>(x.numel()) * size_of(x.dtype())) == 0);
}

void collective_cases_of(parallel::ProcessGroup& group, DType dtype, std::int64_t count) {
  moves(group, dtype, count, 1);
  combinations(group, dtype, count, 2);
  in_place(group, dtype, count, 3);
}

void collective_cases(parallel::ProcessGroup& group, std::int64_t largest) {
  int salt = 0;
  for (int d = 0; d < kDTypeCount; ++d)
    for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, std::int64_t{1100}, largest}) {
      if (count == largest && d > 1) continue;  // large ones in two types only
      moves(group, static_cast<DType>(d), count, ++salt);
      combinations(group, static_cast<DType>(d), count, ++salt);
      if (d < 2) in_place(group, static_cast<DType>(d), count, ++salt);
    }
  group.barrier().wait();
}

void order_cases(parallel::ProcessGroup& group) {
  const int n = group.size(), me = group.rank();
  const double total = n * (n + 1) / 2.0;

  // Views that are not dense, as inputs and outputs.
  Tensor view = zeros({3, 4}).t(), part = zeros({2, 3, 2}).select(2, 1), whole = zeros({2, n, 3}).transpose(0, 1);
  view.fill_(me + 1);
  group.all_reduce(view).wait();
  require(same_bits(view, full({4, 3}, total)), "all_reduce of a view");
  part.fill_(me);
  group.all_gather(whole, part).wait();
  for (int r = 0; r < n; ++r) require(same_bits(whole[r], full({2, 3}, 1.0 * r)), "all_gather of views");

  // More than can be posted at once, waited for in reverse, some dropped.
  std::vector<Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 30; ++i) {
    tensors.push_back(full({i % 3 == 0 ? 5000 : 10}, (me + 1.0) * (i + 1)));
    Work work = group.all_reduce(tensors.back());
    if (i % 4 != 0) works.push_back(std::move(work));
  }
  std::reverse(works.begin(), works.end());
  for (const Work& w : works) w.wait();
  group.barrier().wait();
  for (int i = 0; i < 30; ++i) {
    const Tensor& t = tensors[static_cast<std::size_t>(i)];
    require(same_bits(t, full(t.shape(), total * (i + 1))), "works waited for in reverse");
  }
  Tensor polled = full({3}, me + 1.0);
  const Work work = group.all_reduce(polled);
  while (!work.is_completed()) {
  }
  require(work.exception() == nullptr && same_bits(polled, full({3}, total)), "a work that is only asked for");

  // Works that are dropped end with the next call that is waited for, views too.
  Tensor dropped = zeros({3, 4}).t();
  dropped.fill_(me + 1);
  (void)group.all_reduce(dropped);
  group.barrier().wait();
  require(same_bits(dropped, full({4, 3}, total)), "all_reduce of a view whose work is dropped");

  // Calls under way on one tensor have their effects in order.
  Tensor memory = group.allocate({100'000}, float32);
  for (const std::int64_t count : {4, 1500, 5000, 100'000})
    for (Tensor t : {zeros({count}), memory.narrow(0, 0, count), zeros({count, 2}).select(1, 1)}) {
      t.fill_(me + 1.0);
      Tensor all = empty({n, count});
      const Work first = group.all_reduce(t), second = group.all_reduce(t, ReduceOp::max);
      (void)group.all_gather(all, t);
      const Work third = group.all_reduce(t), fourth = group.broadcast(t, n - 1);
      fourth.wait();
      require(same_bits(t, full({count}, total * n)) && same_bits(all, full({n, count}, total)),
              "several calls on one tensor");
      second.wait();
    }
  // Where the ranks' tensors lie differently, too.
  Tensor place = me == 0 ? memory : zeros({100'000});
  place.fill_(1.0);
  memory.fill_(me == 0 ? 1.0 : 2.0);
  const Work mixed = group.all_reduce(place);
  (void)group.all_reduce(memory, ReduceOp::max);
  group.barrier().wait();
  mixed.wait();
  require(same_bits(memory, full({100'000}, 1.0 * n)), "tensors in different places");

  // Integers wrap, NaN stays.
  Tensor large = full({1}, std::int64_t{1} << 62, {.dtype = int64});
  group.all_reduce(large).wait();
  require(large.item<std::int64_t>() == static_cast<std::int64_t>((std::uint64_t{1} << 62) * static_cast<unsigned>(n)),
          "integers wrap");
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max, ReduceOp::sum}) {
    Tensor nan = full({2}, me == n - 1 ? std::nan("") : 1.0);
    group.all_reduce(nan, op).wait();
    require(std::isnan(nan[0].item<double>()), "a NaN stays");
  }
  if (n == 1) return;

  // NVIDIA/nccl#1394, #1417: ranks that disagree get an error on each, naming both calls; the group works on.
  const bool odd = me == n - 1;
  Tensor four = zeros({4}), five = zeros({5}), doubles = zeros({4}, {.dtype = float64});
  require_error("ranks disagree", [&] { group.all_reduce(odd ? five : four).wait(); });
  require_error("of {5} float32", [&] { group.all_reduce(odd ? five : four).wait(); });
  require_error("of {4} float64", [&] { group.all_reduce(odd ? doubles : four).wait(); });
  require_error("all_reduce (max", [&] { group.all_reduce(four, odd ? ReduceOp::max : ReduceOp::sum).wait(); });
  require_error("broadcast (root 1", [&] { group.broadcast(four, odd ? 1 : 0).wait(); });
  require_error("barrier", [&] { (odd ? group.barrier() : group.broadcast(four, 0)).wait(); });
  const Work disagreed = odd ? group.barrier() : group.all_reduce(four);
  for (int i = 0; i < 2; ++i) require_error("ranks disagree", [&] { disagreed.wait(); });
  require(disagreed.is_completed() && disagreed.exception() != nullptr, "the error of a work stays");
  require(same_bits(four, zeros({4})), "no data move when ranks disagree");
  if (group.backend() == "shm")
    require_error("the ranks disagree: rank 0 allocates 40 bytes of float32, rank",
                  [&] { (void)group.allocate({odd ? 11 : 10}, float32); });

  // A rank that cannot take part says why.
  if (odd)
    group.fail("parameter 'b.weight' got no gradient").wait();
  else
    require_error(fmt::format("rank {} of {}: rank {} cannot take part in all_reduce (sum, call", me, n, n - 1),
                  [&] { group.all_reduce(four).wait(); });
  if (odd)
    group.fail(std::string(5000, 'x')).wait();
  else
    require_error("xxx", [&] { group.barrier().wait(); });
  if (odd || me == 0)
    group.fail("too").wait();
  else
    require_error("rank 0 cannot take part in barrier", [&] { group.barrier().wait(); });
  Tensor again = full({2}, me + 1.0);
  group.all_reduce(again).wait();
  require(same_bits(again, full({2}, total)), "the group works on after errors");

  // Arguments are checked before anything is sent, so that one rank alone may get them wrong.
  if (odd) {
    require_error("root 9 is out of range", [&] { group.broadcast(four, 9); });
    require_error("the tensor is an undefined tensor", [&] {
      Tensor none;
      group.all_reduce(none);
    });
    Tensor whole_numbers = ones({1}, {.dtype = int64});
    require_error("average of int64", [&] { group.all_reduce(whole_numbers, ReduceOp::avg); });
    require_error("one part for each rank", [&] { group.all_gather(five, four); });
  }
  group.barrier().wait();
}

}  // namespace tandem::test
