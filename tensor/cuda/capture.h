// What kernels need while a graph is being captured. Their arguments are frozen then; what the host changes from step
// to step they read from a slot: a piece of device memory that is filled before each replay.
//
// Note [Replays]
// A captured operation is not executed, so capturing it advances nothing on the host: a draw gives its numbers back to
// its stream (repeat_draw), a step is not counted (Optimizer::replayed). Instead each replay, before it launches the
// graph, calls the refresh functions of its slots in the order in which they were asked for, on the thread that
// replays. They do what the host did in the step: draw the next key, count the step and compute its coefficients from
// the settings of now. So a replay leaves the host as an ordinary step would, and its numbers are those of an ordinary
// step. A refresh that throws (an optimizer that is gone, parameters that have moved) ends the replay before the
// launch.
#pragma once
#include <cstddef>

#include <tandem/tensor/callable.h>
#include <tandem/tensor/device.h>

namespace tandem::cuda {

/// Whether the calling thread's work on this device goes into a graph now.
bool capturing(Device device);

/// Memory of the device that lives as long as the graph which is being captured. Before each replay `refresh` writes
/// the new contents to host memory, aligned for any type, from where they are copied in the order of the stream.
void* slot(Device device, std::size_t bytes, UniqueFunction<void(void* host)> refresh);

}  // namespace tandem::cuda
