// One rank of a job, for rendezvous_test.py: joins, sums, leaves, prints what it saw.
// usage: rendezvous_program METHOD [BACKEND [TIMES [TIMEOUT]]]; a METHOD store:PATH gives a store of its own;
// with TIMES 0 it joins once and sums until a rank is lost.
#include <cstdlib>

#include <tandem/parallel/comm/file_store.h>
#include <tandem/tandem.h>

using namespace tandem;

int main(int argc, char** argv) {
  try {
    parallel::InitOptions options;
    const std::string method = argc > 1 ? argv[1] : "env://";
    if (method.starts_with("store:"))
      options.store = std::make_shared<parallel::FileStore>(parallel::FileStoreOptions{.path = method.substr(6)});
    else
      options.init_method = method;
    if (method == "store:both") options.init_method = "file:///tmp/x";
    options.backend = argc > 2 ? argv[2] : "";
    const int times = argc > 3 ? std::atoi(argv[3]) : 1;
    options.timeout_seconds = argc > 4 ? std::atof(argv[4]) : 30;
    std::shared_ptr<parallel::ProcessGroup> kept;  // a group of before does not disturb
    for (int i = 0; i < std::max(1, times); ++i) {
      parallel::init_process_group(options);
      Tensor t = full({3}, parallel::rank() + 1);
      parallel::all_reduce(t);
      print("rank {} of {}: {} by {}\n", parallel::rank(), parallel::world_size(), t,
            parallel::default_group()->backend());
      std::fflush(stdout);
      while (times == 0) parallel::all_reduce(t);
      if (i == 0) kept = parallel::default_group();
      parallel::destroy_process_group();
    }
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
