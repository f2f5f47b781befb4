// A rank's own part of what all ranks do together.
#pragma once
#include <exception>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// Runs `body`. The others would wait for a rank that throws, so its reason takes the place of its next collective; of
/// a CommError they know.
template <class Body>
void do_own_part(ProcessGroup& group, const Body& body) {
  const auto tell = [&](const char* reason) {
    try {
      group.fail(reason).wait();
    } catch (const std::exception&) {  // the first error is what counts
    }
  };
  try {
    body();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& e) {
    tell(e.what());
    throw;
  } catch (...) {
    tell("threw an exception of an unknown type");
    throw;
  }
}

}  // namespace tandem::parallel
