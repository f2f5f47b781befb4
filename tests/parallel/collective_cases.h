// Collectives against a plain computation, whatever the backend.
#pragma once
#include <cstdint>
#include <string_view>

#include <tandem/parallel/comm/process_group.h>

namespace tandem::test {

/// Throws Error unless `ok`: usable on any thread and in any process.
void require(bool ok, std::string_view what);
/// Throws Error unless `body` throws one with `part` in its text.
template <class Body>
void require_error(std::string_view part, const Body& body) {
  try {
    body();
  } catch (const Error& e) {
    require(std::string_view(e.what()).find(part) != std::string_view::npos,
            fmt::format("'{}' is missing in: {}", part, e.what()));
    return;
  }
  require(false, fmt::format("no error with '{}'", part));
}

/// A rank's tensor of `count` elements, other values for each `salt`; products of few of them are in range.
Tensor values_of(int rank, std::int64_t count, DType dtype, int salt = 0);
/// The combination of the ranks' tensors, element by element in the order of the tree.
Tensor combined(const std::vector<Tensor>& parts, parallel::ReduceOp op);
/// Whether shapes, types and all bits are equal.
bool same_bits(const Tensor& a, const Tensor& b);

// All ranks of the group call these.

/// Every collective and operation for a type and a number of elements.
void collective_cases_of(parallel::ProcessGroup& group, DType dtype, std::int64_t count);
/// Every collective, type and operation, with sizes from 0 to `largest` elements.
void collective_cases(parallel::ProcessGroup& group, std::int64_t largest);
/// Views, works waited for in reverse order, many outstanding, works dropped, a rank that fails, ranks that disagree.
void order_cases(parallel::ProcessGroup& group);
/// all_to_all, send and recv in every type, with sizes from 0 to `largest` elements; many at once, among collectives,
/// and with differences; works that are waited for with a limit.
void message_cases(parallel::ProcessGroup& group, std::int64_t largest);
/// Messages of two groups of the same ranks at once.
void messages_in_two_groups(parallel::ProcessGroup& first, parallel::ProcessGroup& second);
/// Wrong arguments of every operation, on one rank or differing between ranks.
void argument_cases(parallel::ProcessGroup& group);

}  // namespace tandem::test
