// The pieces of data parallelism: scatter, replicate, parallel_apply, gather; and data_parallel, which is them in a
// row. All are differentiable. DataParallel is made of the same pieces and keeps its replicas.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include <tandem/nn/module.h>
#include <tandem/parallel/placement.h>

namespace tandem::parallel {

class Replicas;

/// Cuts a tensor along `dim` and puts part i on device i: views of the tensor where devices share its memory. `sizes`
/// are the parts', at most one a device; left out, they are balanced_sizes.
std::vector<Tensor> scatter(const Tensor& x, const DeviceIds& devices, int64_t dim = 0,
                            std::span<const int64_t> sizes = {});
/// The same for tensors that belong together, equally long along `dim`: element i has the parts of all for device i.
std::vector<std::vector<Tensor>> scatter(std::span<const Tensor> inputs, const DeviceIds& devices, int64_t dim = 0,
                                         std::span<const int64_t> sizes = {});
/// The same for the replicas of a placement. A replica that gets no rows gets no tensors.
std::vector<std::vector<Tensor>> scatter(std::span<const Tensor> inputs, const Placement& placement);
/// Binds the module to a set of data on each of the devices. The module must be on the first.
std::shared_ptr<Replicas> replicate(std::shared_ptr<nn::Module> module, const DeviceIds& devices);
/// Calls the module on inputs[i] as replica i, all devices at the same time; a replica without inputs is left out.
/// A backward through any result ends with the sum of the replicas' gradients in the module's parameters.
std::vector<std::vector<Tensor>> parallel_apply(Replicas& replicas, std::span<const std::vector<Tensor>> inputs);
/// Joins tensors from several devices on one, along `dim` (vectors along their only dimension). Single numbers become a
/// vector with one entry a part. Undefined tensors give an undefined one.
Tensor gather(std::span<const Tensor> parts, Device device, int64_t dim = 0);
/// The same for the parts' results, each a list of equally many tensors: the first of all are joined, the second, ...
std::vector<Tensor> gather(std::span<const std::vector<Tensor>> results, Device device, int64_t dim = 0);

/// Runs the module on several devices once. Training calls a DataParallel instead, which keeps the replicas.
std::vector<Tensor> data_parallel(std::shared_ptr<nn::Module> module, std::span<const Tensor> inputs,
                                  const DataParallelOptions& options = {});
/// The same for a module with one input and one output.
Tensor data_parallel(std::shared_ptr<nn::Module> module, const Tensor& x, const DataParallelOptions& options = {});

}  // namespace tandem::parallel
