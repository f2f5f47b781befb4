#include <tandem/parallel/launch/spawn_threads.h>

#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <tandem/parallel/comm/backends.h>
#include <tandem/parallel/comm/hash_store.h>
#include <tandem/parallel/comm/shm_engine.h>
#include <tandem/parallel/comm/store_limits.h>
#include <tandem/tensor/fault.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>
#include <tandem/tensor/trace.h>

namespace tandem::parallel {
namespace {

std::string with_rank(int rank, std::string_view text) {
  return text.starts_with("rank ") ? std::string(text) : fmt::format("rank {}: {}", rank, text);
}

// Calls the function; hands what it threw to `failed`, with the rank before the text, before the other ranks learn of
// it: what they throw then comes later.
bool run_rank(FunctionRef<void(int, int)> function, const ThreadRank& place,
              FunctionRef<void(std::exception_ptr)> failed) {
  auto end = [&](std::exception_ptr error, std::string_view text) {
    failed(std::move(error));
    place.store->set(ended_key(place.rank), fmt::format("has failed ({})", text));
    return false;
  };
  try {
    function(place.rank, place.world_size);
  } catch (const CommError& e) {
    return end(std::make_exception_ptr(CommError(e.rank(), with_rank(place.rank, e.what()))), e.what());
  } catch (const std::exception& e) {
    return end(std::make_exception_ptr(Error(with_rank(place.rank, e.what()))), e.what());
  } catch (...) {
    return end(std::current_exception(), "threw an exception of an unknown type");
  }
  return true;
}

}  // namespace

void spawn_threads(FunctionRef<void(int, int)> function, SpawnThreadsOptions options) {
  check(options.nthreads >= 1, "spawn_threads", "{} threads were asked for; give at least 1", options.nthreads);
  const auto store = std::make_shared<HashStore>();
  std::mutex mutex;
  std::exception_ptr first;
  auto run = [&](int rank) {
    const ThreadRank place{.rank = rank, .world_size = options.nthreads, .store = store};
    t_thread_rank = &place;
    std::optional<SingleThreadScope> single;
    if (options.nthreads > 1) single.emplace();
    const RandomStream stream(rank);
    const fault::RankScope fault_rank(rank);
    const trace::RankScope trace_rank(rank);
    const bool well = run_rank(function, place, [&](std::exception_ptr error) {
      const std::lock_guard lock(mutex);
      if (!first) first = std::move(error);
    });
    if (well) destroy_process_group();  // ends what was started; a rank that failed does not wait for others
    abandon_groups_of_this_thread();
    destroy_process_group();
    t_thread_rank = nullptr;
  };
  std::vector<std::thread> threads;
  try {
    for (int r = 0; r < options.nthreads; ++r) threads.emplace_back(run, r);
  } catch (const std::system_error& e) {
    for (int r = static_cast<int>(threads.size()); r < options.nthreads; ++r)
      store->set(ended_key(r), "could not be started");
    const std::lock_guard lock(mutex);
    first = std::make_exception_ptr(
        Error(fmt::format("[spawn_threads] thread {} cannot be started: {}", threads.size(), e.what())));
  }
  for (std::thread& t : threads) t.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace tandem::parallel
