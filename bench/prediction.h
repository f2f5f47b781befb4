// What a training step should take in each mode, computed from what its pieces were measured to take. Nothing is
// measured here.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "dp_vs_ddp_sides.h"

namespace bench {

/// Microseconds against a size, at the sizes that were measured.
using Curve = std::map<double, double>;
/// On the line between the neighbours; beyond the ends on the line of the last two. One point is a constant.
double at(const Curve& curve, double size);

/// Microseconds of a step's pieces, and what n devices at once cost.
struct Pieces {
  int devices = 1;
  Curve compute = {};       // one device: forward and backward, against rows
  double update = 0;        // one device: the optimizer on all weights
  double dp_slowdown = 1;   // of computing and updating on all devices at once: waiting, and what cores share
  double ddp_slowdown = 1;  // the same of ranks, which have weights of their own
  double dp_wrapper = 0;    // what DataParallel adds to the smallest of steps
  double dp_sum = 0;        // adding the replicas' gradients
  double ddp_wrapper = 0;   // what DistributedDataParallel adds to the smallest of steps, without the all-reduce
  Curve all_reduce = {};    // against bytes
  double hidden_share = 0;  // of an all-reduce, which costs nothing while the ranks compute
};

/// Whether the ranks of such a group have a thread that exchanges while they compute. Without one computing hides
/// nothing: it is the ranks themselves that combine.
bool works_beside(const std::string& backend);

/// A way to run the step.
struct Candidate {
  Mode mode = Mode::one;
  int devices = 1;
  double bucket_mb = 0;                   // of ddp
  std::vector<double> bucket_bytes = {};  // of ddp, in the order in which they are launched
};

/// The step in microseconds, and its parts, which sum to it.
struct Prediction {
  Candidate candidate;
  double compute = 0;   // forward and backward of a part
  double waiting = 0;   // what the slowdown adds to computing and updating
  double update = 0;    // the optimizer's share
  double exchange = 0;  // of gradients, as far as it is not hidden
  double wrapper = 0;
  double step() const { return compute + waiting + update + exchange + wrapper; }
};
Prediction predict(const Pieces& pieces, const Candidate& candidate, double rows);
/// What keeps it from being as many times as fast as `one`, one device, as it has devices.
std::string what_limits(const Prediction& prediction, const Prediction& one);

/// "DistributedDataParallel on 2 ranks, buckets of 1 MiB"
std::string describe(const Candidate& candidate);
/// The number of the fastest; of those that are no more than `margin` slower, the first.
std::size_t best_of(const std::vector<Prediction>& predictions, double margin = 0.02);

}  // namespace bench
