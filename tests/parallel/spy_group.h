// A group that remembers what is called.
#pragma once
#include <tandem/tests/parallel/ddp_cases.h>

namespace tandem::test {

// Passes everything on to another group, and remembers it.
class Spy final : public parallel::ProcessGroup {
 public:
  explicit Spy(Group inner) : inner_(std::move(inner)) {}
  std::string backend() const override { return inner_->backend(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Tensor allocate(const Shape& shape, DType dtype, Device device) override {
    allocations.push_back(inner_->allocate(shape, dtype, device));
    return allocations.back();
  }
  std::vector<std::int64_t> reduced;  // elements of each all_reduce
  std::int64_t reduced_bytes = 0;
  std::vector<std::string> calls;
  std::vector<Tensor> allocations;

 protected:
  parallel::Work start(const parallel::Collective& c) override {
    calls.emplace_back(name(c.operation));
    Tensor input = c.input, output = c.output;
    switch (c.operation) {
      case parallel::Operation::all_reduce:
        reduced.push_back(input.numel());
        reduced_bytes += input.numel() * static_cast<std::int64_t>(size_of(input.dtype()));
        return inner_->all_reduce(input, c.op);
      case parallel::Operation::broadcast:
        return inner_->broadcast(input.defined() ? input : output, c.root);
      case parallel::Operation::all_gather:
        return inner_->all_gather(output, input);
      case parallel::Operation::fail:
        return inner_->fail(c.message);
      default:
        throw Error("an operation that DDP does not use");
    }
  }

 private:
  Group inner_;
};

}  // namespace tandem::test
