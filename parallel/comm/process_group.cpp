// The checks of arguments that all backends share.
#include <tandem/parallel/comm/process_group.h>

#include <cstdint>

#include <tandem/parallel/comm/start_limit.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/fault.h>

namespace tandem::parallel {
namespace {

void check_root(const char* op, int root, int size) {
  check(root >= 0 && root < size, op, "root {} is out of range: the group has ranks 0 to {}", root, size - 1);
}

void check_defined(const char* op, const char* which, const Tensor& t) {
  check(t.defined(), op, "the {} is an undefined tensor; this rank must give one", which);
}

void check_served(const char* op, const ProcessGroup& group, Device device) {
  check(group.serves(device), op, "the tensor is on {}; the backend {} works on tensors of the CPU{}", device,
        group.backend(), device.is_cuda() ? ", and nccl on those of GPUs" : "");
}

void check_peer(const char* op, int peer, int rank, int size) {
  check(peer >= 0 && peer < size, op, "rank {} is out of range: the group has ranks 0 to {}", peer, size - 1);
  check(peer != rank, op, "rank {} is this rank; name another", peer);
}

// `whole` holds a part of `part`'s size for each rank.
void check_parts(const char* op, const char* whole_name, const Tensor& whole, const char* part_name, const Tensor& part,
                 int size) {
  check(whole.dtype() == part.dtype(), op, "the {} is {}, but the {} is {}; convert one with .to(...)", whole_name,
        whole.dtype(), part_name, part.dtype());
  check(whole.numel() == part.numel() * size, op,
        "the {} of shape {} must have {} times the elements of the {} of shape {}, one part for each rank", whole_name,
        whole.shape(), size, part_name, part.shape());
}

void check_op(const char* name, ReduceOp op, DType dtype) {
  check(op != ReduceOp::avg || is_floating(dtype), name,
        "the average of {} tensors is not defined; convert with .to(float64), or take the sum", dtype);
  check(
      dtype != DType::boolean || op == ReduceOp::min || op == ReduceOp::max, name,
      "bool tensors are combined with ReduceOp::min (all) or ReduceOp::max (any); for counts convert with .to(int64)");
}

// The bytes from the first element in memory to the last; none for a tensor without elements.
struct Extent {
  std::intptr_t first = 0, end = 0;
};
Extent extent_of(const Tensor& t) {
  if (t.numel() == 0) return {};
  const View view = t.raw();
  const auto width = static_cast<std::int64_t>(size_of(view.dtype));
  Extent e{.first = reinterpret_cast<std::intptr_t>(view.data)};
  e.end = e.first + width;
  for (int i = 0; i < view.dims; ++i) {
    const std::int64_t reach = (view.shape[i] - 1) * view.strides[i] * width;
    (reach < 0 ? e.first : e.end) += reach;
  }
  return e;
}

// Backends move data in different orders: where the output overlaps the input, what they write would depend on that.
void check_memory(const Collective& c, int rank) {
  if (!c.output.defined()) return;
  const View out = c.output.raw();
  for (int i = 0; i < out.dims; ++i)
    check(out.shape[i] <= 1 || out.strides[i] != 0, name(c.operation),
          "several elements of this expanded view {} share one place in memory, so that no result can be written "
          "there; call clone() and give that",
          c.output.shape());
  const bool in_place = c.operation == Operation::all_reduce || c.operation == Operation::reduce;
  if (!c.input.defined() || in_place) return;
  const Extent a = extent_of(c.input), b = extent_of(c.output);
  if (a.first >= b.end || b.first >= a.end) return;
  const bool gathers = c.operation == Operation::all_gather || c.operation == Operation::gather;
  const bool cuts = c.operation == Operation::scatter || c.operation == Operation::reduce_scatter;
  const Extent &whole = gathers ? b : a, &part = gathers ? a : b;
  const bool is_own = part.first == whole.first + rank * (part.end - part.first);
  if ((gathers || cuts) && is_own && c.input.is_contiguous() && c.output.is_contiguous()) return;
  std::string or_own;
  if (gathers || cuts)
    or_own = fmt::format(", or, as the {}, exactly part {} of a dense {}, which is this rank's",
                         gathers ? "input" : "output", rank, gathers ? "output" : "input");
  fail(name(c.operation), "the input of shape {} and the output of shape {} share memory; give another tensor{}",
       c.input.shape(), c.output.shape(), or_own);
}

}  // namespace

Tensor ProcessGroup::allocate(const Shape& shape, DType dtype, Device device) {
  check_served("allocate", *this, device);
  return zeros(shape, {.dtype = dtype, .device = device});
}

Work ProcessGroup::run(Collective c) {
  check(rank() >= 0, name(c.operation), "this process is not a member of the group; only its members may call it");
  for (const Tensor& t : {c.input, c.output})
    if (t.defined()) check_served(name(c.operation), *this, t.device());
  if (c.input.defined() && c.output.defined())
    check(c.input.device().type() == c.output.device().type(), name(c.operation),
          "the input is on {}, but the output is on {}; they must be on one device", c.input.device(),
          c.output.device());
  check_memory(c, rank());
  const bool in_place = c.input.defined() && c.output.defined() && c.input.identity() == c.output.identity();
  if (c.input.defined()) c.input = c.input.detach();
  if (c.output.defined()) c.output = in_place ? c.input : c.output.detach();
  c.purpose = Purpose::current();
  StartLimit* const limit = is_message(c.operation) ? nullptr : StartLimit::before_start(*this);
  StartLimit::send_all();
  if (is_message(c.operation)) return send_off(c);
  Work work = limit ? limit->hold([this, c] { return send_off(c); }) : send_off(c);
  StartLimit::remember(work);
  return work;
}

Work ProcessGroup::send_off(const Collective& c) {
  const bool counts = !is_message(c.operation), gives_up = !given_up_.empty();
  if (gives_up && !counts) return Work::failing({}, std::make_exception_ptr(Error(given_up_)));
  Work work = start(gives_up ? Collective{.operation = Operation::fail, .message = given_up_} : c);
  call_count_ += counts;
  fault::point(fault::Point::collective);
  return gives_up ? Work::failing(std::move(work), std::make_exception_ptr(Error(given_up_))) : work;
}

Work ProcessGroup::all_reduce(Tensor& t, ReduceOp op) {
  check_defined("all_reduce", "tensor", t);
  check_op("all_reduce", op, t.dtype());
  return run({.operation = Operation::all_reduce, .op = op, .input = t, .output = t});
}

Work ProcessGroup::broadcast(Tensor& t, int root) {
  check_defined("broadcast", "tensor", t);
  check_root("broadcast", root, size());
  Collective c{.operation = Operation::broadcast, .root = root};
  (rank() == root ? c.input : c.output) = t;
  return run(std::move(c));
}

Work ProcessGroup::reduce(Tensor& t, int root, ReduceOp op) {
  check_defined("reduce", "tensor", t);
  check_root("reduce", root, size());
  check_op("reduce", op, t.dtype());
  Collective c{.operation = Operation::reduce, .op = op, .root = root, .input = t};
  if (rank() == root) c.output = t;
  return run(std::move(c));
}

Work ProcessGroup::all_gather(Tensor& output, const Tensor& input) {
  check_defined("all_gather", "input", input);
  check_defined("all_gather", "output", output);
  check_parts("all_gather", "output", output, "input", input, size());
  return run({.operation = Operation::all_gather, .input = input, .output = output});
}

Work ProcessGroup::gather(Tensor& output, const Tensor& input, int root) {
  check_defined("gather", "input", input);
  check_root("gather", root, size());
  Collective c{.operation = Operation::gather, .root = root, .input = input};
  if (rank() == root) {
    check_defined("gather", "output", output);
    check_parts("gather", "output", output, "input", input, size());
    c.output = output;
  }
  return run(std::move(c));
}

Work ProcessGroup::scatter(Tensor& output, const Tensor& input, int root) {
  check_defined("scatter", "output", output);
  check_root("scatter", root, size());
  Collective c{.operation = Operation::scatter, .root = root, .output = output};
  if (rank() == root) {
    check_defined("scatter", "input", input);
    check_parts("scatter", "input", input, "output", output, size());
    c.input = input;
  }
  return run(std::move(c));
}

Work ProcessGroup::reduce_scatter(Tensor& output, const Tensor& input, ReduceOp op) {
  check_defined("reduce_scatter", "input", input);
  check_defined("reduce_scatter", "output", output);
  check_op("reduce_scatter", op, input.dtype());
  check_parts("reduce_scatter", "input", input, "output", output, size());
  return run({.operation = Operation::reduce_scatter, .op = op, .input = input, .output = output});
}

Work ProcessGroup::all_to_all(Tensor& output, const Tensor& input) {
  check_defined("all_to_all", "input", input);
  check_defined("all_to_all", "output", output);
  check(input.dtype() == output.dtype() && input.shape() == output.shape(), "all_to_all",
        "the input is {} {}, but the output is {} {}; they must be the same", input.shape(), input.dtype(),
        output.shape(), output.dtype());
  check(input.numel() % size() == 0, "all_to_all", "{} elements cannot be cut into {} equal parts, one for each rank",
        input.numel(), size());
  return run({.operation = Operation::all_to_all, .input = input, .output = output});
}

Work ProcessGroup::send(const Tensor& t, int to) {
  check_defined("send", "tensor", t);
  check_peer("send", to, rank(), size());
  return run({.operation = Operation::send, .root = to, .input = t});
}

Work ProcessGroup::recv(Tensor& t, int from) {
  check_defined("recv", "tensor", t);
  check_peer("recv", from, rank(), size());
  return run({.operation = Operation::recv, .root = from, .output = t});
}

Work ProcessGroup::barrier() { return run({}); }

Work ProcessGroup::fail(const std::string& message) { return run({.operation = Operation::fail, .message = message}); }

void ProcessGroup::give_up(const std::string& message) {
  if (given_up_.empty() && size() > 1) given_up_ = message;
}

}  // namespace tandem::parallel
