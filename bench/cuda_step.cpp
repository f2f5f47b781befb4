// cuda_step: a training step of an MLP on one CUDA device, as a user writes it, and captured in a graph. The same in
// PyTorch is bench/peers/pytorch_cuda.py.
#include <nlohmann/json.hpp>

#include <tandem/tandem.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/cuda_graph.h>

#include "model.h"
#include "options.h"
#include "timing.h"

using namespace tandem;

namespace {

struct Settings {
  std::vector<std::int64_t> batch_sizes{64, 4096}, widths{512, 4096};
  std::vector<std::string> optimizers{"sgd", "adam"};
  int layers = 2, rounds = 11;
  double round_ms = 100;
  bool graph = false, tf32 = false;
  std::string json;
};

// Forward, loss, backward, update on fixed data.
class Step {
 public:
  Step(std::int64_t width, std::int64_t batch_size, bool adam, int layers)
      : model_(bench::make_mlp(layers, width)),
        x_(rand({batch_size, 784}).to("cuda")),
        y_(randint(0, 10, {batch_size}).to("cuda")) {
    model_->to("cuda");
    optimizer_ = bench::make_optimizer(adam, model_->parameters(), 1e-6);
  }
  void run() {
    loss_ = criterion_((*model_)(x_), y_);
    loss_.backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

 private:
  std::shared_ptr<nn::SequentialImpl> model_;
  Tensor x_, y_, loss_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  nn::CrossEntropyLoss criterion_;
};

double seconds_of(int calls, const std::function<void()>& call) {
  cuda::synchronize();
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) call();
  cuda::synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Microseconds a call in each round, all of a round's calls given to the device before it is waited for.
std::vector<double> measure(const std::function<void()>& call, const Settings& settings) {
  seconds_of(5, call);  // memory, and the choice of products
  const double guess = seconds_of(3, call) / 3;
  const int calls = std::max(3, static_cast<int>(settings.round_ms * 1e-3 / guess));
  std::vector<double> times;
  for (int round = 0; round < settings.rounds; ++round) times.push_back(seconds_of(calls, call) / calls * 1e6);
  return times;
}

void run(const Settings& settings) {
  check(cuda::is_available(), "cuda_step", "needs a CUDA device: {}", cuda::unavailable_reason());
  cuda::set_allow_tf32(settings.tf32);
  const cuda::DeviceProperties device = cuda::properties();
  print("{} (compute capability {}.{}), {} hidden layers, {}\n", device.name, device.major, device.minor,
        settings.layers, settings.tf32 ? "TF32" : "float32");
  print("{:>6} {:>6} {:>9} {:>6} {:>12} {:>9} {:>9}\n", "width", "batch", "optimizer", "way", "median (us)", "p10",
        "p90");
  nlohmann::json records = nlohmann::json::array();
  for (const std::int64_t width : settings.widths)
    for (const std::int64_t batch_size : settings.batch_sizes)
      for (const std::string& optimizer : settings.optimizers) {
        Step step(width, batch_size, optimizer == "adam", settings.layers);
        const auto report = [&](const char* way, const std::vector<double>& times) {
          const double median = bench::median(times), low = bench::quantile(times, 0.1),
                       high = bench::quantile(times, 0.9);
          print("{:>6} {:>6} {:>9} {:>6} {:>12.1f} {:>9.1f} {:>9.1f}\n", width, batch_size, optimizer, way, median, low,
                high);
          std::fflush(stdout);
          records.push_back({{"width", width},
                             {"batch_size", batch_size},
                             {"optimizer", optimizer},
                             {"way", way},
                             {"median_us", median},
                             {"p10_us", low},
                             {"p90_us", high}});
          // Also what there is when time runs out.
          if (!settings.json.empty() && !bench::write_json(settings.json, records.dump(1))) std::exit(1);
        };
        report("plain", measure([&] { step.run(); }, settings));
        if (settings.graph) {
          cuda::Graph graph;
          graph.capture([&] { step.run(); });
          report("graph", measure([&] { graph.replay(); }, settings));
        }
      }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  bench::Options options(
      "Times a training step of an MLP on one CUDA device. It needs an NVIDIA GPU with its driver, and the module "
      "libtandem_cuda.so. bench/peers/pytorch_cuda.py times the same step in PyTorch.");
  options.number("--width", &settings.widths, "of the hidden layers");
  options.number("--batch-size", &settings.batch_sizes, "rows a step");
  options.word("--optimizer", &settings.optimizers, "sgd, adam", {"sgd", "adam"});
  options.number("--layers", &settings.layers, "hidden layers", 1, 100);
  options.number("--rounds", &settings.rounds, "times that are taken", 1, 1000);
  options.number("--round-ms", &settings.round_ms, "about how long a round is");
  options.flag("--graph", &settings.graph, "also captured in a graph");
  options.flag("--tf32", &settings.tf32, "products may round to TF32");
  options.word("--json", &settings.json, "write the results here");
  if (const std::optional<int> code = options.parse(argc, argv)) return *code;
  try {
    run(settings);
    return 0;
  } catch (const Error& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
}
