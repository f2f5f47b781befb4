// step_limit: our whole training step of the MLP 784-512-512-10 against the same products and the same update as bare
// library calls and loops, interleaved in one run.
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include <tandem/tandem.h>

#include "bare.h"
#include "options.h"
#include "timing.h"

using namespace tandem;

namespace {

// One training step on fixed data: forward, loss, backward, update, zero_grad.
class OurStep {
 public:
  OurStep(std::int64_t batch_size, bool adam)
      : model_(nn::Linear(784, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, 10)),
        x_(rand({batch_size, 784})),
        y_(randint(0, 10, {batch_size})) {
    if (adam)
      optimizer_ = std::make_unique<optim::Adam>(model_->parameters(), optim::AdamOptions{.lr = 1e-6});
    else
      optimizer_ = std::make_unique<optim::SGD>(model_->parameters(), optim::SGDOptions{.lr = 1e-6});
  }
  void run() {
    const Tensor loss = loss_(model_(x_), y_);
    loss.backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

 private:
  nn::Sequential model_;
  nn::CrossEntropyLoss loss_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  Tensor x_, y_;
};

struct Settings {
  std::vector<std::int64_t> batch_sizes{8, 64, 512};
  std::vector<std::string> optimizers{"sgd", "adam"};
  std::vector<int> threads{1, 2};
  int rounds = 21;
  double round_ms = 25;
};

nlohmann::json measure(std::int64_t batch_size, const std::string& optimizer, int threads, const Settings& settings) {
  set_num_threads(threads);
  const bool adam = optimizer == "adam";
  bench::BareStep with_sgemm(batch_size, adam, threads, bench::BareForward::sgemm);
  bench::BareStep with_matmul(batch_size, adam, threads, bench::BareForward::matmul);
  OurStep ours(batch_size, adam);
  // Products alone, in a loop of their own: what the bare step must reach with its interleaved products.
  const auto alone = bench::time_rounds({[&] { with_sgemm.run_products(); }, [&] { with_matmul.run_products(); }}, 5,
                                        settings.round_ms);
  const auto times = bench::time_rounds({[&] { ours.run(); }, [&] { with_sgemm.run(); }, [&] { with_matmul.run(); },
                                         [&] { with_sgemm.run_products(); }, [&] { with_matmul.run_products(); }},
                                        settings.rounds, settings.round_ms);
  const double limit = std::min(bench::median(times[1]), bench::median(times[2]));
  const auto& better = bench::median(times[1]) <= bench::median(times[2]) ? times[1] : times[2];
  const double products = std::min(bench::median(times[3]), bench::median(times[4]));
  const double products_alone = std::min(bench::median(alone[0]), bench::median(alone[1]));
  return {{"batch_size", batch_size},
          {"optimizer", optimizer},
          {"threads", threads},
          {"median_us", bench::median(times[0])},
          {"p10_us", bench::quantile(times[0], 0.1)},
          {"p90_us", bench::quantile(times[0], 0.9)},
          {"limit_us", limit},
          {"ratio", bench::median_ratio(times[0], better)},
          {"products_us", products},
          {"products_of_standalone", products_alone / products}};
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  std::string json_file;
  bench::Options options(
      "Our training step of the MLP 784-512-512-10 against its bare limit: the same matrix products as direct "
      "oneDNN calls and the same update as plain loops, interleaved in one run. 'limit' is the faster of two "
      "bare variants; 'ratio' is the median over rounds of ours / limit.");
  options.number("--batch-size", &settings.batch_sizes, "rows a step, a comma-separated list");
  options.word("--optimizer", &settings.optimizers, "sgd, adam", {"sgd", "adam"});
  options.number("--threads", &settings.threads, "numbers of threads", 1);
  options.number("--rounds", &settings.rounds, "interleaved rounds", 1);
  options.word("--json", &json_file, "write the records to this file");
  if (const std::optional<int> code = options.parse(argc, argv)) return *code;

  nlohmann::json records = nlohmann::json::array();
  fmt::print("{:>6} {:>9} {:>7} {:>12} {:>12} {:>7} {:>22}\n", "batch", "optimizer", "threads", "ours (us)",
             "limit (us)", "ratio", "bare of stand-alone");
  for (const int threads : settings.threads)
    for (const std::int64_t batch_size : settings.batch_sizes)
      for (const std::string& optimizer : settings.optimizers) {
        const nlohmann::json r = measure(batch_size, optimizer, threads, settings);
        fmt::print("{:>6} {:>9} {:>7} {:>12.0f} {:>12.0f} {:>7.2f} {:>21.0f}%\n", batch_size, optimizer, threads,
                   r["median_us"].get<double>(), r["limit_us"].get<double>(), r["ratio"].get<double>(),
                   100 * r["products_of_standalone"].get<double>());
        std::fflush(stdout);
        records.push_back(r);
      }
  if (!json_file.empty() && !bench::write_json(json_file, records.dump(1))) return 1;
}
