// What the backend nccl does with tensors on GPUs, as functions that every rank of a group runs.
#pragma once
#include <memory>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::test {

/// Every operation and type, against what the group does with the same tensors on the CPU.
void gpu_collective_cases(parallel::ProcessGroup& group, Device device);
/// Views, many under way, dropped ones, several on one tensor, other streams of events, wrong devices.
void gpu_order_cases(parallel::ProcessGroup& group, Device device);
/// Memory from allocate comes and goes.
void gpu_memory_cases(parallel::ProcessGroup& group, Device device);
/// Training with DistributedDataParallel gives the losses of one process on the CPU.
void gpu_training_cases(const std::shared_ptr<parallel::ProcessGroup>& group, Device device);
/// Steps of training that are captured in a graph and replayed give the parameters of the same steps without one; what
/// cannot be captured is an error that leaves all usable.
void gpu_graph_cases(const std::shared_ptr<parallel::ProcessGroup>& group, Device device);
/// The same with an optimizer that is divided among the ranks.
void gpu_divided_graph_cases(const std::shared_ptr<parallel::ProcessGroup>& group, Device device);
/// Parameters on several devices, and ranks whose models are on other kinds of devices. For two ranks.
void gpu_device_cases(const std::shared_ptr<parallel::ProcessGroup>& group, Device device);
/// Ranks that disagree, and one that takes no part: the group works on for the CPU alone. The last cases of a group.
void gpu_error_cases(parallel::ProcessGroup& group, Device device);

}  // namespace tandem::test
