// Stacking of examples and selection of rows, for any number of tensors.
#include <tandem/data/dataset.h>

#include <tandem/data/internal.h>
#include <tandem/tensor/backend.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/random.h>

namespace tandem::data::detail {
namespace {

thread_local const std::atomic<bool>* t_stop = nullptr;

// The part of `batch` that holds example i.
View row_of(const View& batch, int64_t i) {
  View row = batch;
  row.dims = batch.dims - 1;
  std::copy(batch.shape + 1, batch.shape + batch.dims, row.shape);
  std::copy(batch.strides + 1, batch.strides + batch.dims, row.strides);
  row.data = batch.ptr<char>() + static_cast<std::size_t>(i * batch.strides[0]) * size_of(batch.dtype);
  return row;
}

// Before each row: leaves when the loader has stopped, and gives the row random numbers of its own.
void start_row(int64_t row) {
  if (t_stop != nullptr && t_stop->load(std::memory_order_relaxed)) throw Stopped();
  if (PhiloxKey* key = RandomScope::current()) key->block = first_block(row);
}

}  // namespace

StopScope::StopScope(const std::atomic<bool>* stop) : previous_(t_stop) { t_stop = stop; }
StopScope::~StopScope() { t_stop = previous_; }

void check_row(std::string_view op, int64_t row, int64_t size) {
  check(row >= 0 && row < size, op, "row {} does not exist; there are {} rows, counted from 0", row, size);
}

int64_t check_rows(std::span<Tensor> tensors) {
  for (Tensor& t : tensors) {
    check(t.defined() && t.dim() > 0, "TensorDataset", "tensor {} has no rows; give tensors of one dimension or more",
          &t - tensors.data());
    check(t.size(0) == tensors[0].size(0), "TensorDataset",
          "tensor 0 has {} rows and tensor {} has {}; give one row an example in each", tensors[0].size(0),
          &t - tensors.data(), t.size(0));
    t = t.detach().contiguous();
  }
  return tensors[0].size(0);
}

void select_rows(std::span<const Tensor> tensors, std::span<const int64_t> rows, std::span<Tensor> batch) {
  const Tensor index = from_span(rows);
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    const Tensor& from = tensors[k];
    Shape shape = from.shape();
    shape[0] = index.numel();
    batch[k] = empty(shape, {.dtype = from.dtype(), .device = from.device()});
    const Backend& table = backend(from.device());
    kernel("TensorDataset", table, table.index_select)(from.raw(), 0, index.to(from.device()).raw(),
                                                       batch[k].raw_for_write());
  }
}

void stack_rows(std::span<const int64_t> rows, FunctionRef<void(int64_t, std::span<Tensor>)> get,
                std::span<Tensor> batch) {
  check(!rows.empty(), "get_batch", "no rows were asked for, so the shapes are unknown; give at least one row");
  std::vector<Tensor> example(batch.size());
  std::vector<View> views(batch.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    start_row(rows[i]);
    get(rows[i], example);
    for (std::size_t k = 0; k < batch.size(); ++k) {
      const Tensor& x = example[k];
      check(x.defined(), "get_batch", "tensor {} of row {} is undefined; return a tensor in each place", k, rows[i]);
      if (i == 0) {
        Shape shape = x.shape();
        shape.insert(0, static_cast<int64_t>(rows.size()));
        batch[k] = empty(shape, {.dtype = x.dtype(), .device = x.device()});
        views[k] = batch[k].raw_for_write();
      }
      const View from = x.raw(), to = row_of(views[k], static_cast<int64_t>(i));
      check(x.dtype() == batch[k].dtype() && x.device() == batch[k].device() &&
                std::equal(from.shape, from.shape + from.dims, to.shape, to.shape + to.dims),
            "get_batch",
            "tensor {} of row {} is {} {} on {}, and of row {} {} {} on {}; examples that are stacked must agree", k,
            rows[0], batch[k].dtype(),
            Shape(std::span(views[k].shape + 1, static_cast<std::size_t>(views[k].dims - 1))), batch[k].device(),
            rows[i], x.dtype(), x.shape(), x.device());
      copy_values(from, to);
    }
  }
}

}  // namespace tandem::data::detail
