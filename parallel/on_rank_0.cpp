#include <tandem/parallel/on_rank_0.h>

#include <chrono>
#include <future>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/own_part.h>
#include <tandem/tensor/create.h>
#include <tandem/tensor/fault.h>
#include <tandem/tensor/thread_context.h>

namespace tandem::parallel {
namespace {

// The others shall not take rank 0 for lost while it works: at such intervals it says that it is alive.
constexpr auto kSignOfLife = std::chrono::milliseconds(250);

}  // namespace

// The calling thread is the one that speaks to the others, so that another one works.
void on_rank_0(FunctionRef<void()> work, ProcessGroup& group) {
  Tensor done = zeros({1});
  if (group.rank() != 0) {
    while (done.item<float>() == 0) group.broadcast(done, 0).wait();
    return;
  }
  const int thread_rank = t_thread_rank == nullptr ? -1 : t_thread_rank->rank;
  const auto run = [&, context = t_thread_context] {
    const ThreadContextScope scope(context);
    const fault::RankScope fault_rank(thread_rank);
    work();
  };
  std::future<void> ended = std::async(std::launch::async, run);
  while (ended.wait_for(kSignOfLife) != std::future_status::ready) group.broadcast(done, 0).wait();
  do_own_part(group, [&] { ended.get(); });
  done = ones({1});
  group.broadcast(done, 0).wait();
}

}  // namespace tandem::parallel
