// What a rank throws about another in a collective: the same words on every backend.
#pragma once
#include <string>
#include <string_view>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// The rank that says it, of how many, and in which call.
struct Caller {
  int rank = 0, size = 1;
  Fingerprint call = {};
};

CommError ranks_disagree(const Caller& caller, int other, const Fingerprint& others_call);
/// Of a send and the recv that it meets.
CommError messages_differ(const Caller& caller, int other, const Fingerprint& others_call);
CommError cannot_take_part(const Caller& caller, int other, std::string_view why);
/// The text without the rank that says it; `whom` names the ranks that did not come.
std::string waited_in_vain(const Fingerprint& call, double seconds, std::string_view whom);

}  // namespace tandem::parallel
