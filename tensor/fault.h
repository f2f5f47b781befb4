// Faults on purpose, for labs and tests: TANDEM_FAULT="kill rank=1 step=5" makes a rank end, stop, wait or throw at a
// named point. Without the variable a point is one look at a constant.
#pragma once

namespace tandem::fault {

/// Where a fault can be. The text in TANDEM_FAULT is the name, with "=N" for the N-th time where it can come again.
enum class Point {
  start,       // init_process_group begins
  init,        // in init_process_group, once the others know this rank
  group,       // the default group is made
  step,        // Optimizer::step begins
  backward,    // DistributedDataParallel's backward has launched its first bucket
  collective,  // a collective has been started, and has not ended
  save         // the bytes of a file are written, and it has not got its name
};

/// Whether TANDEM_FAULT is set.
extern const bool wanted;
/// Counts that the calling rank has come to the point, and does what TANDEM_FAULT asks for here. Error when that is to
/// throw, or when the variable cannot be understood.
void reach(Point point);

inline void point(Point p) {
  if (wanted) [[unlikely]]
    reach(p);
}

/// Says which rank this process is; until then RANK says it.
void set_rank(int rank);

/// Makes the calling thread a rank of its own, until it is destroyed; -1: the process's.
class RankScope {
 public:
  explicit RankScope(int rank);
  ~RankScope();
  RankScope(const RankScope&) = delete;
  RankScope& operator=(const RankScope&) = delete;
};

}  // namespace tandem::fault
