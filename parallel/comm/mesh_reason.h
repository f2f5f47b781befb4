// Who is to blame when a group over a mesh has broken: the members find one answer through the store.
#pragma once
#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/mesh.h>

namespace tandem::parallel {

/// Where the answer is kept. Who sees it there knows that the group is broken.
std::string lost_key(const GroupSetup& setup);

/// What the member `rank` throws for an exchange that failed in `call`. Takes less than 2 s, or 2.2 s on several hosts
/// where no reason is to be found; the others get to know the answer meanwhile.
CommError explain(const GroupSetup& setup, int rank, const ExchangeError& error, const Fingerprint& call);

}  // namespace tandem::parallel
