// The cases of wrong arguments: those that a rank sees itself, and those that differ between ranks.
#include <functional>
#include <vector>

#include <tandem/tensor/create.h>
#include <tandem/tests/parallel/collective_cases.h>

namespace tandem::test {

using parallel::ProcessGroup;
using parallel::ReduceOp;

namespace {

// Nothing is sent, so that one rank alone may call them.
void own_faults(ProcessGroup& group) {
  const int n = group.size(), me = group.rank(), peer = (me + 1) % n;
  Tensor none, part = ones({4}), parts = ones({4 * n}), other = ones({4 * n}), doubles = ones({4}, {.dtype = float64});
  const std::string range = fmt::format("the group has ranks 0 to {}", n - 1);
  for (const int bad : {-1, n, 99}) {
    const std::string root = fmt::format("root {} is out of range: {}", bad, range);
    require_error("[broadcast] " + root, [&] { group.broadcast(part, bad); });
    require_error("[reduce] " + root, [&] { group.reduce(part, bad); });
    require_error("[gather] " + root, [&] { group.gather(parts, part, bad); });
    require_error("[scatter] " + root, [&] { group.scatter(part, parts, bad); });
    const std::string rank = fmt::format("rank {} is out of range: {}", bad, range);
    require_error("[send] " + rank, [&] { group.send(part, bad); });
    require_error("[recv] " + rank, [&] { group.recv(part, bad); });
  }
  require_error(fmt::format("[send] rank {} is this rank", me), [&] { group.send(part, me); });
  require_error(fmt::format("[recv] rank {} is this rank", me), [&] { group.recv(part, me); });

  constexpr const char* kNoTensor = "the tensor is an undefined tensor; this rank must give one";
  constexpr const char* kNoInput = "the input is an undefined tensor";
  constexpr const char* kNoOutput = "the output is an undefined tensor";
  require_error(kNoTensor, [&] { group.all_reduce(none); });
  require_error(kNoTensor, [&] { group.broadcast(none, 0); });
  require_error(kNoTensor, [&] { group.reduce(none, 0); });
  require_error(kNoTensor, [&] { group.send(none, peer); });
  require_error(kNoTensor, [&] { group.recv(none, peer); });
  require_error(kNoInput, [&] { group.all_gather(parts, none); });
  require_error(kNoOutput, [&] { group.all_gather(none, part); });
  require_error(kNoInput, [&] { group.gather(parts, none, me); });
  require_error(kNoOutput, [&] { group.gather(none, part, me); });
  require_error(kNoInput, [&] { group.scatter(part, none, me); });
  require_error(kNoOutput, [&] { group.scatter(none, parts, me); });
  require_error(kNoInput, [&] { group.reduce_scatter(part, none); });
  require_error(kNoOutput, [&] { group.reduce_scatter(none, parts); });
  require_error(kNoInput, [&] { group.all_to_all(parts, none); });
  require_error(kNoOutput, [&] { group.all_to_all(none, parts); });

  Tensor short_one = ones({3});
  constexpr const char* kParts = "one part for each rank";
  require_error(kParts, [&] { group.all_gather(parts, short_one); });
  require_error(kParts, [&] { group.gather(parts, short_one, me); });
  require_error(kParts, [&] { group.scatter(short_one, parts, me); });
  require_error(kParts, [&] { group.reduce_scatter(short_one, parts); });
  require_error("they must be the same", [&] { group.all_to_all(short_one, parts); });
  require_error("the output is float64, but the input is float32", [&] { group.all_gather(doubles, part); });
  require_error("the input is float32, but the output is float64", [&] { group.reduce_scatter(doubles, parts); });
  require_error("they must be the same", [&] { group.all_to_all(doubles, part); });
  if (n > 1) {
    const Tensor odd = ones({n + 1});
    Tensor target = ones({n + 1});
    require_error(fmt::format("{} elements cannot be cut into {} equal parts, one for each rank", n + 1, n),
                  [&] { group.all_to_all(target, odd); });
  }

  Tensor flags = ones({n}, {.dtype = boolean}), flag = ones({1}, {.dtype = boolean});
  Tensor numbers = ones({n}, {.dtype = int64}), number = ones({1}, {.dtype = int64});
  constexpr const char* kBool = "bool tensors are combined with ReduceOp::min";
  require_error(kBool, [&] { group.all_reduce(flags); });
  require_error(kBool, [&] { group.reduce(flags, 0); });
  require_error(kBool, [&] { group.reduce_scatter(flag, flags); });
  constexpr const char* kAverage = "the average of int64 tensors is not defined";
  require_error(kAverage, [&] { group.all_reduce(numbers, ReduceOp::avg); });
  require_error(kAverage, [&] { group.reduce(numbers, 0, ReduceOp::avg); });
  require_error(kAverage, [&] { group.reduce_scatter(number, numbers, ReduceOp::avg); });
  require(same_bits(part, ones({4})) && same_bits(parts, other), "wrong arguments change nothing");
}

// Outputs that a result cannot be written to. Nothing is sent.
void memory_faults(ProcessGroup& group) {
  const int n = group.size(), me = group.rank(), peer = (me + 1) % n;
  Tensor part = ones({4}), parts = ones({n, 4}), same = parts.view({n, 4});
  Tensor wide = ones({1}).expand({4}), wide_parts = ones({1, 4}).expand({n, 4});
  constexpr const char* kShared = "share memory; give another tensor";
  const std::string or_output = fmt::format("{}, or, as the output, exactly part {} of a dense input", kShared, me);
  const std::string or_input = fmt::format("{}, or, as the input, exactly part {} of a dense output", kShared, me);
  require_error(kShared, [&] { group.all_to_all(parts, parts); });
  require_error(kShared, [&] { group.all_to_all(same, parts); });
  constexpr const char* kExpanded = "several elements of this expanded view {4} share one place in memory";
  require_error(kExpanded, [&] { group.all_reduce(wide); });
  require_error(kExpanded, [&] { group.reduce(wide, me); });
  require_error(kExpanded, [&] { group.scatter(wide, parts, me); });
  require_error(kExpanded, [&] { group.reduce_scatter(wide, parts); });
  if (n == 1) return;
  require_error(std::string("[broadcast] ") + kExpanded, [&] { group.broadcast(wide, peer); });
  require_error(std::string("[recv] ") + kExpanded, [&] { group.recv(wide, peer); });
  require_error("of this expanded view", [&] { group.all_gather(wide_parts, part); });
  require_error("of this expanded view", [&] { group.gather(wide_parts, part, me); });
  require_error("of this expanded view", [&] { group.all_to_all(wide_parts, parts); });
  Tensor columns = ones({4, n}).t(), own_column = columns[me];
  require_error(or_input, [&] { group.all_gather(columns, own_column); });
  require_error(or_output, [&] { group.scatter(own_column, columns, me); });
  for (Tensor other : {parts[peer], parts.view({4 * n}).narrow(0, 2, 4)}) {
    require_error(or_input, [&] { group.all_gather(parts, other); });
    require_error(or_input, [&] { group.gather(parts, other, me); });
    require_error(or_output, [&] { group.scatter(other, parts, me); });
    require_error(or_output, [&] { group.reduce_scatter(other, parts); });
  }
  require(same_bits(parts, ones({n, 4})), "wrong memory is left as it is");
}

// One rank's tensors are of another shape or type: an error on every rank that names both calls.
void differences(ProcessGroup& group) {
  const int n = group.size(), me = group.rank();
  const bool odd = me == n - 1;
  // Calls an operation whose share has this shape and type.
  using Call = std::function<void(const Shape&, DType)>;
  const auto make = [](const Shape& shape, DType dtype) { return ones(shape, {.dtype = dtype}); };
  const auto whole = [n](const Shape& part, DType dtype) { return ones({n, part.numel()}, {.dtype = dtype}); };
  const std::vector<std::pair<const char*, Call>> calls = {
      {"all_reduce",
       [&](const Shape& s, DType d) {
         Tensor t = make(s, d);
         group.all_reduce(t).wait();
       }},
      {"broadcast",
       [&](const Shape& s, DType d) {
         Tensor t = make(s, d);
         group.broadcast(t, 0).wait();
       }},
      {"reduce",
       [&](const Shape& s, DType d) {
         Tensor t = make(s, d);
         group.reduce(t, 0).wait();
       }},
      {"all_gather",
       [&](const Shape& s, DType d) {
         Tensor t = whole(s, d);
         group.all_gather(t, make(s, d)).wait();
       }},
      {"gather",
       [&](const Shape& s, DType d) {
         Tensor t = whole(s, d);
         group.gather(t, make(s, d), 0).wait();
       }},
      {"scatter",
       [&](const Shape& s, DType d) {
         Tensor t = make(s, d);
         group.scatter(t, whole(s, d), 0).wait();
       }},
      {"reduce_scatter",
       [&](const Shape& s, DType d) {
         Tensor t = make(s, d);
         group.reduce_scatter(t, whole(s, d)).wait();
       }},
      {"all_to_all",
       [&](const Shape& s, DType d) {
         Tensor t = make(s, d);
         group.all_to_all(t, make(s, d)).wait();
       }},
  };
  const std::int64_t rows = 4 * n;
  struct Difference {
    Shape shape;
    DType dtype;
    std::string text;
  };
  const std::vector<Difference> others = {{{2 * rows}, float32, fmt::format("of {{{}}} float32", 2 * rows)},
                                          {{2, rows / 2}, float32, fmt::format("of {{2, {}}} float32", rows / 2)},
                                          {{rows}, float64, fmt::format("of {{{}}} float64", rows)},
                                          {{rows}, int32, fmt::format("of {{{}}} int32", rows)}};
  const std::string usual = fmt::format("of {{{}}} float32", rows);
  for (const auto& [name, call] : calls)
    for (const Difference& other : others) {
      std::string text;
      try {
        call(odd ? other.shape : Shape{rows}, odd ? other.dtype : float32);
      } catch (const parallel::CommError& e) {
        text = e.what();
        require(e.rank() == (odd ? 0 : n - 1), "the rank of the error");
      }
      const auto has = [&](const std::string& part) {
        require(text.find(part) != std::string::npos, fmt::format("'{}' is missing in: {}", part, text));
      };
      has(fmt::format("rank {} of {}: the ranks disagree: rank {} calls {} (", me, n, me, name));
      has(fmt::format(" {}, rank {} calls {} (", odd ? other.text : usual, odd ? 0 : n - 1, name));
      has(fmt::format(" {};", odd ? usual : other.text));
    }
}

}  // namespace

void argument_cases(ProcessGroup& group) {
  if (group.rank() == group.size() - 1) {
    own_faults(group);
    memory_faults(group);
  }
  group.barrier().wait();
  if (group.size() > 1) differences(group);
  group.barrier().wait();
}

}  // namespace tandem::test
