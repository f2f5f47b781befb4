// What dp_vs_ddp measures on all ranks in turn: the pieces of a step, to advise a mode, and the price of the guard
// against ranks that drift apart.
#pragma once
#include "dp_vs_ddp_sides.h"

namespace bench {

/// 2, 4, 8, ... and the number of cores itself.
std::vector<int> device_counts(int cores);
/// For each batch size and optimizer: measures the pieces of a step and runs each mode, number of devices and bucket
/// size in turn, prints what the pieces predict, says what to use, and shows the runs beside. Returns the exit code.
int advise(const Settings& settings);
/// The step of ddp with and without check_every, in turn.
int guard_cost(const Settings& settings);

}  // namespace bench
