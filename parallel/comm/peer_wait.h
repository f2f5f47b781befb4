// PeerWait: how a rank that makes a group with others waits for what each of them says in the store.
#pragma once
#include <chrono>
#include <optional>
#include <string>

#include <tandem/parallel/comm/backends.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

/// Of one rank that makes a group. Its time begins here, and is that of all waits together.
class PeerWait {
 public:
  explicit PeerWait(const GroupSetup& setup);
  /// The value of a key that a member sets; calls `meanwhile` again and again until it is there. CommError names the
  /// member when it has ended, or has left the job, without setting the key, or when the time is over.
  std::string value_of(const std::string& key, int member, FunctionRef<void()> meanwhile) const;
  /// How a member has ended or left, such as "was killed by signal 9"; null when the store knows of no end.
  std::optional<std::string> end_of(int member) const;
  /// CommError when the time is over, which was spent on waiting for the member.
  void check_time(int member) const;

 private:
  std::string me() const;
  const GroupSetup& setup_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace tandem::parallel
