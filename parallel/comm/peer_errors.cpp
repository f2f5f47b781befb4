#include <tandem/parallel/comm/peer_errors.h>

#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {

CommError ranks_disagree(const Caller& c, int other, const Fingerprint& others_call) {
  return {other, fmt::format("{}the ranks disagree: rank {} calls {}, rank {} calls {}; every rank must call the same "
                             "operations in the same order, on tensors of one size and type",
                             who(c.rank, c.size), c.rank, describe(c.call), other, describe(others_call))};
}

CommError messages_differ(const Caller& c, int other, const Fingerprint& others_call) {
  return {other, fmt::format("{}the ranks disagree: rank {} calls {}, rank {} calls {}; what is received must have the "
                             "shape and the type of what is sent. This message is lost",
                             who(c.rank, c.size), c.rank, describe(c.call), other, describe(others_call))};
}

CommError cannot_take_part(const Caller& c, int other, std::string_view why) {
  return {other,
          fmt::format("{}rank {} cannot take part in {}: {}", who(c.rank, c.size), other, describe(c.call), why)};
}

std::string waited_in_vain(const Fingerprint& call, double seconds, std::string_view whom) {
  return fmt::format(
      "waited {} s in {} for {}, which is stopped, slow, or in another part of the program; a longer wait "
      "is set by InitOptions::timeout_seconds",
      seconds, describe(call), whom);
}

}  // namespace tandem::parallel
