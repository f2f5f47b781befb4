// What a rank throws about another in a collective: the same words on every backend.
#pragma once
#include <string>
#include <string_view>

#include <tandem/parallel/comm/backends.h>

namespace tandem::parallel {

/// The group of the rank that says it, and its call.
struct Caller {
  const GroupSetup& setup;
  const Fingerprint& call;
};

CommError ranks_disagree(const Caller& caller, int other, const Fingerprint& others_call);
/// Of a send and the recv that it meets.
CommError messages_differ(const Caller& caller, int other, const Fingerprint& others_call);
CommError cannot_take_part(const Caller& caller, int other, std::string_view why);
/// The text without the rank that says it; `whom` names the ranks that did not come.
std::string waited_in_vain(const Fingerprint& call, double seconds, std::string_view whom);

}  // namespace tandem::parallel
