#include <tandem/tests/parallel/mesh_cases.h>

#include <tandem/parallel/comm/combine.h>
#include <tandem/tandem.h>
#include <tandem/tests/parallel/collective_cases.h>

namespace tandem::test {

using parallel::ReduceOp;
using parallel::Work;

namespace {

std::string what(std::string_view name, DType dtype, std::int64_t count) {
  return fmt::format("{} of {} elements of {}", name, count, dtype);
}

// By the function that all backends use.
Tensor combination(const std::vector<Tensor>& parts, ReduceOp op) {
  Tensor result = empty(parts[0].shape(), {.dtype = parts[0].dtype()});
  std::vector<const void*> data;
  for (const Tensor& t : parts) data.push_back(t.raw().data);
  parallel::combine(result.dtype(), op, data, std::vector<void*>{result.raw_for_write().data}, result.numel());
  return result;
}

}  // namespace

void messages_between_all(parallel::ProcessGroup& group) {
  const int n = group.size(), me = group.rank();
  if (n == 1) return;
  const int next = (me + 1) % n, previous = (me + n - 1) % n;

  // Around the ring, in pieces too, of every type.
  for (int d = 0; d < kDTypeCount; ++d)
    for (const std::int64_t count : {0, 1, 1100, 9'000'001}) {
      const auto dtype = static_cast<DType>(d);
      if (count > 1100 && dtype != uint8) continue;
      const auto sent_by = [&](int r) {
        return count > 1100 ? full({count}, r, {.dtype = dtype}) : values_of(r, count, dtype);
      };
      const Tensor mine = sent_by(me);
      Tensor theirs = zeros({count}, {.dtype = dtype});
      const Work sent = group.send(mine, next);
      group.recv(theirs, previous).wait();
      sent.wait();
      require(same_bits(theirs, sent_by(previous)), what("recv", dtype, count));
    }

  // Many under way between all, in the order of the sends; views; waited for in reverse.
  std::vector<Work> works;
  std::vector<Tensor> results;
  for (int i = 0; i < 20; ++i)
    for (int peer = 0; peer < n; ++peer) {
      if (peer == me) continue;
      results.push_back(i % 2 == 0 ? zeros({2, 3}) : zeros({3, 2}).t());
      works.push_back(group.recv(results.back(), peer));
      const Tensor t = full({3, 2}, me * 100.0 + i).t();
      works.push_back(group.send(t, peer));
    }
  // Collectives go on beside them.
  Tensor sum = full({5000}, me + 1.0);
  group.all_reduce(sum).wait();
  require(same_bits(sum, full({5000}, n * (n + 1) / 2.0)), "all_reduce beside messages");
  for (std::size_t i = works.size(); i-- > 0;) works[i].wait();
  std::size_t next_result = 0;
  for (int i = 0; i < 20; ++i)
    for (int peer = 0; peer < n; ++peer)
      if (peer != me)
        require(same_bits(results[next_result++], full({2, 3}, peer * 100.0 + i)), "messages arrive in order");

  // A message that is on its way holds nothing up: neither collectives nor others.
  Tensor first = zeros({4}), second = zeros({4});
  if (me == 0) {
    const Work late = group.recv(first, 1);
    group.send(ones({4}), 1).wait();
    group.barrier().wait();
    late.wait();
    require(same_bits(first, full({4}, 2.0)), "a message that came after a collective");
  } else if (me == 1) {
    group.recv(second, 0).wait();
    group.barrier().wait();
    group.send(full({4}, 2.0), 0).wait();
  } else {
    group.barrier().wait();
  }

  // Both sides of a disagreement get an error that names both calls; the next message arrives.
  if (me < 2) {
    const int other = 1 - me;
    Tensor four = ones({4}), five = zeros({5}), doubles = zeros({4}, {.dtype = float64}), square = zeros({2, 2});
    for (Tensor* wrong : {&five, &doubles, &square}) {
      const std::string got = wrong == &five      ? "of {5} float32"
                              : wrong == &doubles ? "of {4} float64"
                                                  : "of {2, 2} float32";
      const auto call = [&] { (me == 0 ? group.send(four, 1) : group.recv(*wrong, 0)).wait(); };
      require_error(fmt::format("rank {} of {}: the ranks disagree: rank {} calls {} ({} {}, call", me, n, me,
                                me == 0 ? "send" : "recv", me == 0 ? "to" : "from", other),
                    call);
      require_error(me == 0 ? got : "send (to 1, call", call);
      require_error("what is received must have the shape and the type of what is sent. This message is lost", call);
      require(same_bits(*wrong, zeros(wrong->shape(), {.dtype = wrong->dtype()})), "a lost message changes nothing");
      (me == 0 ? group.send(four, 1) : group.recv(five = zeros({4}), 0)).wait();
      require(me == 0 || same_bits(five, ones({4})), "the message after a lost one");
      five = zeros({5});
    }
    // Arguments are checked before anything is sent.
    require_error("is this rank; name another", [&] { (void)group.send(four, me); });
    require_error("is out of range", [&] { (void)group.recv(four, n); });
  }
  group.barrier().wait();
}

void parts_between_all(parallel::ProcessGroup& group) {
  const int n = group.size(), me = group.rank();
  for (int d = 0; d < kDTypeCount; ++d)
    for (const std::int64_t count : {0, 1, 1100}) {
      const auto dtype = static_cast<DType>(d);
      Tensor out = zeros({n, count}, {.dtype = dtype});
      group.all_to_all(out, values_of(me, n * count, dtype).view({n, count})).wait();
      for (int r = 0; r < n; ++r)
        require(same_bits(out[r], values_of(r, n * count, dtype).view({n, count})[me]),
                what("all_to_all", dtype, count));
    }
  const std::int64_t count = 9'000'001;
  Tensor large = zeros({n, count}, {.dtype = uint8});
  group.all_to_all(large, full({n, count}, me, {.dtype = uint8})).wait();
  for (int r = 0; r < n; ++r) require(same_bits(large[r], full({count}, r, {.dtype = uint8})), "all_to_all in pieces");
  Tensor out = zeros({3, n}).t();
  const Tensor in = (arange(3 * n).view({3, n}) + me * 100.0).to(float32).t();
  group.all_to_all(out, in).wait();
  for (int r = 0; r < n; ++r)
    for (int i = 0; i < 3; ++i) require(out[r][i].item<double>() == i * n + me + r * 100.0, "all_to_all of views");
}

void host_cases(parallel::ProcessGroup& group) {
  const int n = group.size(), me = group.rank();
  for (int d = 0; d < kDTypeCount; ++d)
    for (const std::int64_t bytes : {0, 64 << 10, 70'008}) {
      const auto dtype = static_cast<DType>(d);
      const std::int64_t count = bytes / static_cast<std::int64_t>(size_of(dtype));
      std::vector<Tensor> all;
      for (int r = 0; r < n; ++r) all.push_back(values_of(r, count, dtype, 3));
      const Tensor& mine = all[static_cast<std::size_t>(me)];
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::min, ReduceOp::max, ReduceOp::avg}) {
        if (dtype == boolean && op != ReduceOp::min && op != ReduceOp::max) continue;
        if (op == ReduceOp::avg && !is_floating(dtype)) continue;
        const Tensor expected = combination(all, op);
        Tensor t = mine.clone();
        group.all_reduce(t, op).wait();
        require(same_bits(t, expected), what("all_reduce", dtype, count));
        for (const int root : {0, n - 1}) {
          if (op != (is_floating(dtype) ? ReduceOp::avg : ReduceOp::max)) continue;
          t = mine.clone();
          group.reduce(t, root, op).wait();
          require(same_bits(t, me == root ? expected : mine), what("reduce", dtype, count));
        }
      }
      for (const int root : {0, n - 1}) {
        Tensor t = mine.clone();
        group.broadcast(t, root).wait();
        require(same_bits(t, all[static_cast<std::size_t>(root)]), what("broadcast", dtype, count));
      }
    }
  // Several pieces that do not divide, and a view.
  const std::int64_t count = 1'100'003;
  const Tensor numbers = arange(count).to(float64);
  Tensor view = zeros({count, 2}, {.dtype = float64}).select(1, 1);
  view.copy_(numbers * (me + 1.0));
  const Work first = group.all_reduce(view, ReduceOp::avg), second = group.broadcast(view, n - 1);
  second.wait();
  first.wait();
  require(equal(view, numbers * ((n + 1) / 2.0)), "average in pieces");
}

const std::vector<HostLayout>& host_layouts() {
  static const std::vector<HostLayout> layouts = {{{0, 0, 2, 2}},       {{0, 0, 0, 3, 3}},     {{0, 1, 2, 2}},
                                                  {{0, 0, 2, 3, 3}},    {{0, 0, 0, 3}, false}, {{0, 1, 1, 1}, false},
                                                  {{0, 1, 0, 1}, false}};
  return layouts;
}

}  // namespace tandem::test
