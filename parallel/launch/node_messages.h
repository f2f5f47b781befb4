// What launchers write into the store for each other, as lines of text.
#pragma once
#include <string>
#include <vector>

namespace tandem::parallel {

/// What has ended a job: the first death of a rank, a node that is lost, or a signal.
struct Failure {
  std::string what = {};   // such as "rank 1 of 4 failed with exit code 3", without a point
  std::string where = {};  // such as "host a, node 1"
  int exit_code = 1;
  bool final = false;  // a restart would not help
  std::vector<std::string> last_lines = {};
};

/// What a launcher tells the others when it comes.
struct Arrival {
  std::string terms = {};  // options in which all must agree
  std::string host = {};
  std::string token = {};  // random, of this start
  int nprocs = 0;
};

/// The fields of an Arrival hold no line feeds.
std::string to_text(const Failure& failure);
std::string to_text(const Arrival& arrival);
Failure failure_from(const std::string& text);
Arrival arrival_from(const std::string& text);

}  // namespace tandem::parallel
