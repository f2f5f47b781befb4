#include <tandem/parallel/comm/peer_errors.h>

#include <tandem/parallel/comm/store_limits.h>

namespace tandem::parallel {
namespace {

std::string me(const Caller& c) { return who(c.setup.place(), static_cast<int>(c.setup.ranks.size())); }

std::string both_calls(const Caller& c, int other, const Fingerprint& others_call) {
  return fmt::format("{}the ranks disagree: {} calls {}, {} calls {}", me(c), c.setup.rank_name(c.setup.place()),
                     describe(c.call), c.setup.rank_name(other), describe(others_call));
}

}  // namespace

std::string GroupSetup::rank_name(int member) const {
  const int in_job = ranks[static_cast<std::size_t>(member)];
  return in_job == member ? fmt::format("rank {}", member)
                          : fmt::format("rank {} (rank {} of the job)", member, in_job);
}

CommError ranks_disagree(const Caller& c, int other, const Fingerprint& others_call) {
  const auto starts = static_cast<std::int32_t>(JoinStage::starts);
  std::string_view advice =
      "every rank must call the same operations in the same order, on tensors of one size and type";
  if (c.call.stage == starts || others_call.stage == starts)
    advice = "every rank of the group calls join";
  else if (c.call.of_join() != others_call.of_join())
    advice =
        "in a join, a rank whose loop is over takes part in what wrapped models and divided optimizers do, and in "
        "nothing else: move other calls to after the join";
  return {other, fmt::format("{}; {}", both_calls(c, other, others_call), advice)};
}

CommError messages_differ(const Caller& c, int other, const Fingerprint& others_call) {
  return {other, both_calls(c, other, others_call) +
                     "; what is received must have the shape and the type of what is sent. This message is lost"};
}

CommError cannot_take_part(const Caller& c, int other, std::string_view why) {
  return {other,
          fmt::format("{}{} cannot take part in {}: {}", me(c), c.setup.rank_name(other), describe(c.call), why)};
}

std::string waited_in_vain(const Fingerprint& call, double seconds, std::string_view whom) {
  return fmt::format(
      "waited {} s in {} for {}, which is stopped, slow, or in another part of the program; a longer wait "
      "is set by InitOptions::timeout_seconds",
      seconds, describe(call), whom);
}

}  // namespace tandem::parallel
