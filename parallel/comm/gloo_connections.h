// The connections of a group over Gloo's TCP transport, made with the help of our store.
#pragma once
#include <memory>

#include <tandem/parallel/comm/backends.h>

namespace gloo {
class Context;
}

namespace tandem::parallel {

/// Connects all members; `rank` is this process's in the group. CommError names one that does not come.
std::shared_ptr<gloo::Context> connect_gloo(const GroupSetup& setup, int rank);

}  // namespace tandem::parallel
