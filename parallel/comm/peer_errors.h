// What a rank throws about another in a collective: the same words on every backend.
#pragma once
#include <string_view>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::parallel {

/// The rank that says it, of how many, and in which call.
struct Caller {
  int rank = 0, size = 1;
  Fingerprint call = {};
};

CommError ranks_disagree(const Caller& caller, int other, const Fingerprint& others_call);
CommError cannot_take_part(const Caller& caller, int other, std::string_view why);
/// `whom` names the ranks that did not come, of which `first` is one; `note` is what else is known.
CommError waited_in_vain(const Caller& caller, double seconds, int first, std::string_view whom,
                         std::string_view note = {});

}  // namespace tandem::parallel
