// Checkpoints of a job: what is resumed goes on with the same bits, with random numbers that each rank draws for
// itself.
#include <tandem/tests/parallel/ddp_cases.h>
#include <tandem/tests/parallel/job_file.h>

namespace tandem::test {
namespace {

using parallel::load_checkpoint;
using parallel::save_checkpoint;

struct Training {
  explicit Training(const Group& g) : group(g) {
    net = std::make_shared<nn::SequentialImpl>(nn::Linear(6, 16), nn::Dropout(0.5), nn::Linear(16, 4));
    net->to(float64);
    fill(*net);
    ddp = std::make_unique<parallel::DistributedDataParallel>(
        net, parallel::DistributedDataParallelOptions{.process_group = group});
    optimizer = std::make_unique<optim::Adam>(net->parameters(), optim::AdamOptions{.lr = 0.01});
  }
  void steps(std::int64_t count) {
    for (; count > 0; --count, ++progress.step) {
      // Ranks draw numbers of their own, and not equally many.
      if (group->rank() % 2 == 1) mean((*net)(wave({9, 6}, 1)));
      mean(pow((*ddp)(part(wave({12, 6}, 0.1 * static_cast<double>(progress.step)), group)), 2)).backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }
  Group group;
  std::shared_ptr<nn::SequentialImpl> net;
  std::unique_ptr<parallel::DistributedDataParallel> ddp;
  std::unique_ptr<optim::Optimizer> optimizer;
  Progress progress;
};

void resumed_with_the_same_bits(const Group& group) {
  const std::string path = file_of(group, "resumed");
  group->barrier().wait();  // where ranks are threads, the seed is one
  manual_seed(7);
  group->barrier().wait();
  Training whole(group);
  whole.steps(3);
  save_checkpoint(path, {whole.net, whole.optimizer, whole.progress}, group);
  whole.steps(4);
  group->barrier().wait();
  Training again(group);
  (void)randn({5});
  again.steps(1);
  load_checkpoint(path, {again.net, again.optimizer, again.progress}, {}, group);
  require(again.progress.step == 3, "the progress");
  again.steps(4);
  const auto a = whole.net->parameters(), b = again.net->parameters();
  for (std::size_t i = 0; i < a.size(); ++i)
    require(equal(a[i].detach(), b[i].detach()), "a resumed job has the weights of one that was not stopped");
  group->barrier().wait();
  if (group->rank() == 0) std::filesystem::remove(path);
}

// A file of a single process, and one of ranks that have one random state, which is the same file.
void one_random_state(const Group& group) {
  const std::string path = file_of(group, "one_state");
  Training t(group);
  group->barrier().wait();
  manual_seed(9);
  group->barrier().wait();
  save_checkpoint(path, {t.net}, group);
  if (group->rank() == 0) {
    save(path + "alone", {t.net});
    require(std::filesystem::file_size(path) == std::filesystem::file_size(path + "alone"), "nothing is added");
  }
  group->barrier().wait();
  for (const char* name : {"", "alone"}) {
    manual_seed(10);
    group->barrier().wait();
    load_checkpoint(path + name, {t.net}, {}, group);
    require(random_state().seed == 9, "the random state of the file");
    group->barrier().wait();
  }
  if (group->rank() == 0) std::filesystem::remove(path);
  if (group->rank() == 0) std::filesystem::remove(path + "alone");
}

void errors(const Group& group) {
  const std::string path = file_of(group, "errors");
  Training t(group);
  const std::string text = require_error({"/no/such/folder/file cannot be written"},
                                         [&] { save_checkpoint("/no/such/folder/file", {t.net}, group); });
  require(group->rank() == 0 || text.find("rank 0 cannot take part in broadcast") != std::string::npos, text);
  // Random states of ranks that differ, as they do in processes that have drawn differently, are for as many ranks.
  const auto alone = group->size() > 1 ? parallel::new_group({0}) : group;
  if (group->rank() == 1) (void)rand({4});
  save_checkpoint(path, {t.net}, group);
  const bool differ = group->size() > 1 && group->backend() != "thread";
  if (group->rank() == 0 && differ)
    require_error({fmt::format("the file was saved by {} ranks, but there are 1", group->size())},
                  [&] { load_checkpoint(path, {t.net}, {}, alone); });
  group->barrier().wait();
  if (group->size() > 1) {
    // A rank whose objects are others than those of the file, and one that has another file.
    if (group->rank() == 0) save(path + "other", {t.net, t.optimizer});
    save_checkpoint(path, {t.net}, group);
    const bool odd = group->rank() == 1;
    auto small = std::make_shared<nn::SequentialImpl>(nn::Linear(2, 2));
    const std::string reason =
        require_error({odd ? "does not fit, and nothing was changed" : "rank 1 cannot take part in"},
                      [&] { load_checkpoint(path, {odd ? small : t.net}, {}, group); });
    require(reason.find("does not fit") != std::string::npos, reason);
    const Tensor before = t.net->parameters()[0].detach().clone();
    t.steps(1);
    const Tensor stepped = t.net->parameters()[0].detach().clone();
    require_error({"is not the same file on rank 1 as on rank 0"},
                  [&] { load_checkpoint(odd ? path + "other" : path, {t.net}, {}, group); });
    require_error({"is not the same file on rank 1 as on rank 0"},
                  [&] { load_checkpoint(odd ? "/no/such/file" : path, {t.net}, {}, group); });
    require(equal(t.net->parameters()[0].detach(), stepped) && !equal(before, stepped), "nothing has changed");
  }
  require_error({"/no/such/file"}, [&] { load_checkpoint("/no/such/file", {t.net}, {}, group); });
  group->barrier().wait();
  if (group->rank() == 0) std::filesystem::remove(path);
  if (group->rank() == 0) std::filesystem::remove(path + "other");
}

}  // namespace

std::vector<DdpCase> checkpoint_cases() {
  return {{"resumed with the same bits", resumed_with_the_same_bits},
          {"one random state", one_random_state},
          {"errors of checkpoints", errors}};
}

}  // namespace tandem::test
