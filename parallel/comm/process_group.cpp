// The checks of arguments that all backends share.
#include <tandem/parallel/comm/process_group.h>

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

// `whole` holds a part of `part`'s size for each rank.
void check_peer(const char* op, int peer, int rank, int size) {
  check(peer >= 0 && peer < size, op, "rank {} is out of range: the group has ranks 0 to {}", peer, size - 1);
  check(peer != rank, op, "rank {} is this rank; name another", peer);
}

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

}  // namespace

Tensor ProcessGroup::allocate(const Shape& shape, DType dtype) { return zeros(shape, {.dtype = dtype}); }

Work ProcessGroup::run(Collective c) {
  check(rank() >= 0, name(c.operation), "this process is not a member of the group; only its members may call it");
  for (const Tensor& t : {c.input, c.output})
    if (t.defined() && !t.device().is_cpu())
      tandem::fail(name(c.operation), "the tensor is on {}; the backend {} works on tensors of the CPU", t.device(),
                   backend());
  const bool in_place = c.input.defined() && c.output.defined() && c.input.identity() == c.output.identity();
  if (c.input.defined()) c.input = c.input.detach();
  if (c.output.defined()) c.output = in_place ? c.input : c.output.detach();
  Work work = start(c);
  fault::point(fault::Point::collective);
  return work;
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
  check(input.identity() != output.identity(), "all_to_all", "the output is the input; give another tensor");
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

}  // namespace tandem::parallel
