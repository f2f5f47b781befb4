// Task: the Work of a collective or a message between ranks that share memory.
#pragma once
#include <exception>
#include <memory>

#include <tandem/parallel/comm/collective.h>
#include <tandem/parallel/comm/work.h>

namespace tandem::parallel {

class Engine;

/// A call that was started and has not ended. The members are used with the engine's mutex locked; wait reads the error
/// when the task is done.
class Task final : public Work::State {
 public:
  Task(std::shared_ptr<Engine> engine, const Collective& c, const Fingerprint& f)
      : collective(c), call(f), engine_(std::move(engine)) {}
  bool poll() override;
  void wait() override;
  /// Ends it, with the error if there is one, and lets go of its tensors.
  void end(std::exception_ptr why);

  Collective collective;
  const Fingerprint call;
  bool done = false;
  std::exception_ptr error = nullptr;

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace tandem::parallel
