// Measures several things in turn on the ranks of a job, so that a drifting machine is fair to all.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "dp_vs_ddp_sides.h"

namespace bench {

/// Something to measure. All ranks have the same list.
struct Turn {
  std::function<Phases(int calls)> run = {};                // microseconds a call of one thing or more
  int ranks = 1;                                            // the first so many take part, and the others wait
  int multiple = 1;                                         // of which the number of calls is one
  int calls = 0;                                            // chosen by rank 0
  std::map<std::string, std::vector<double>> samples = {};  // a number a round

  /// Over the rounds.
  double typical(const std::string& what) const;
};

/// Runs each for about `round_ms` in each round, in an order that changes from round to round: what a turn leaves to
/// the next one is fair to all, too. Called by all ranks of the default group.
void take_turns(std::vector<Turn>& turns, int rounds, double round_ms);

/// The mean of `calls` calls of `body`, as "whole".
Phases mean_of(int calls, const std::function<void()>& body);

/// Calls body with the devices and threads of a mode.
template <class Body>
auto in(Mode mode, int devices, const Body& body) {
  enter(mode, devices);
  auto result = body();
  enter(Mode::one, 1);
  return result;
}

}  // namespace bench
