// Cases for groups over a mesh: messages, and groups whose members are on several hosts.
#pragma once
#include <vector>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/tensor/callable.h>

namespace tandem::test {

// All ranks of the group call these.

/// send and recv: a ring, both ways at once, many under way, views, empty ones, beside collectives, disagreements.
void messages_between_all(parallel::ProcessGroup& group);
/// all_to_all of every type, in pieces, and of views.
void parts_between_all(parallel::ProcessGroup& group);
/// all_reduce, reduce and broadcast of every type and operation, with sizes around those where the way changes.
void host_cases(parallel::ProcessGroup& group);

/// How four or five ranks may lie on hosts, and whether sums go by host.
struct HostLayout {
  std::vector<int> hosts;
  bool in_tree = true;
};
const std::vector<HostLayout>& host_layouts();

}  // namespace tandem::test
