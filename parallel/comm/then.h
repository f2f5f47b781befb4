// What follows a collective: work that begins when it has ended.
#pragma once
#include <concepts>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>

#include <tandem/parallel/comm/process_group.h>
#include <tandem/tensor/callable.h>

namespace tandem::parallel {

// Note [Continuations]: what follows a collective runs in wait(), on the thread that waits, never in is_completed(). So
// collectives that it starts come in the order of the waits, which is the same on all ranks, whatever the order in
// which a rank has seen the first ones end. Where the first one fails, what follows is not run, and every wait throws
// what the first has thrown.

/// A Work that ends when `first` has ended well and `next` has then run: that is in the first call of wait(), or of
/// wait(seconds) or exception() once `first` has ended. `next` communicates nothing: a collective is refused with an
/// Error. What it throws, every later wait throws too; the other ranks go on. A Work of this kind is used by one thread
/// at a time.
Work then(Work first, UniqueFunction<void()> next);
/// The same for a `next` that starts one collective of the group; the Work ends when that has ended. Every rank calls
/// wait(), in the same order as other collectives of the group; wait(seconds) and exception() only look whether it has
/// been done. It starts no second one: that is refused with an Error, before anything is sent. What it starts begins
/// when `next` has ended well, or waits for it. Where that is nothing on this rank, or `next` throws, or cannot be run
/// because of an error of this rank alone, ProcessGroup::fail takes the place of its collective: the others get the
/// reason, and the ranks stay in step. Where `next` throws after it has waited for its collective, see
/// ProcessGroup::give_up.
Work then(Work first, std::shared_ptr<ProcessGroup> group, UniqueFunction<Work()> next);
/// A Work would be lost: give the group.
template <class F>
requires std::same_as<std::invoke_result_t<F&>, Work> Work then(Work first, F&& next)
= delete;

/// For a rank that cannot start its collective because of `error`: starts ProcessGroup::fail in its place, by which the
/// others learn that `what` has ended with it. The Work ends with that call, and throws `error`.
Work fail_with(ProcessGroup& group, const std::string& what, const std::exception_ptr& error);
/// For a rank on which `what` has ended with `error` after its collective had begun: the others may start another that
/// follows it, or may not. ProcessGroup::give_up, with the reason.
void give_up_after(ProcessGroup& group, const std::string& what, const std::exception_ptr& error);

}  // namespace tandem::parallel
