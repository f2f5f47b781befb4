#include "fashion_mnist_options.h"

#include <filesystem>

#include <CLI/CLI.hpp>

#include "option_checks.h"

namespace {

bool same_file(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code no;
  const auto resolved = [&](const std::string& path) { return fs::weakly_canonical(fs::absolute(path, no), no); };
  return !a.empty() && !b.empty() && (resolved(a) == resolved(b) || fs::equivalent(a, b, no));
}

}  // namespace

int parse_options(int argc, char** argv, Options& o) {
  CLI::App app{
      "Trains the MLP 784-512-512-10 on Fashion-MNIST: on one device, with DataParallel (one process, a thread for "
      "each device) or with DistributedDataParallel (a process for each device).\n\n"
      "  fashion_mnist --epochs 5\n"
      "  fashion_mnist --parallel dp --devices 2\n"
      "  fashion_mnist --parallel ddp --nproc 2\n"
      "  tandem-run -n 2 fashion_mnist --parallel ddp\n"
      "  fashion_mnist --device cuda --graph\n"
      "  tandem-run -n 2 --max-restarts 3 fashion_mnist --parallel ddp --save run.safetensors --save-every 100\n\n"
      "A job that the launcher starts again (RESTART_COUNT is above 0) goes on from the file of --save where it has "
      "written it itself; what an earlier run has left there is taken by --resume alone."};
  app.get_formatter()->column_width(28);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // scripts put defaults first
  auto* parallel =
      app.add_option("--parallel", o.parallel, "none, dp or ddp")->check(CLI::IsMember({"none", "dp", "ddp"}));
  parallel->type_name("MODE")->capture_default_str();
  app.add_option("--devices", o.devices, "dp: number of devices (default: all, at least 2 CPU devices)")
      ->check(number_from(1, 64));
  app.add_option("--nproc", o.nproc, "ddp: start this many processes; without it, start the program by tandem-run")
      ->check(number_from(1, 64));
  app.add_option("--backend", o.backend, "ddp: process group, shm, gloo, mpi or nccl (default: the best)")
      ->type_name("NAME");
  app.add_option("--comm-hook", o.comm_hook, "ddp: how gradients travel: none (as they are), fp16, bf16 or powersgd")
      ->check(CLI::IsMember({"none", "fp16", "bf16", "powersgd"}))
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--powersgd-rank", o.powersgd_rank, "powersgd: rank of the two factors that stand for a gradient")
      ->check(number_from(1, 64))
      ->capture_default_str();
  app.add_option(
         "--device", o.device,
         "cpu, or cuda, which needs an NVIDIA GPU with its driver; without --parallel also one of several: cuda:1")
      ->check(device_name())
      ->type_name("DEVICE")
      ->capture_default_str();
  app.add_flag("--graph", o.graph, "cuda, one device: capture the training step once and replay it by one launch");
  app.add_option("--threads", o.threads, "threads in all, divided among devices or processes (default: one a core)")
      ->check(number_from(1, 1024));
  app.add_option("--reproducible", o.reproducible,
                 "the same bits in every mode, on 1, 2, 4, ... up to so many devices or processes")
      ->check(power_of_two_to(2048))
      ->type_name("PARTS");
  app.add_option("--epochs", o.epochs, "passes over the data")
      ->check(number_from(0, std::int64_t{1} << 40))
      ->capture_default_str();
  app.add_option("--batch-size", o.batch_size, "rows a step, over all devices or processes together")
      ->check(number_from(1, 60'000))
      ->capture_default_str();
  app.add_option("--optimizer", o.optimizer, "sgd, adam or adamw")
      ->check(CLI::IsMember({"sgd", "adam", "adamw"}))
      ->type_name("NAME")
      ->capture_default_str();
  app.add_option("--lr", o.lr, "learning rate")->check(number_from(0))->capture_default_str();
  app.add_option("--momentum", o.momentum, "of sgd")->check(number_from(0))->capture_default_str();
  app.add_option("--weight-decay", o.weight_decay, "of any optimizer")->check(number_from(0))->capture_default_str();
  app.add_flag("--zero", o.zero, "ddp: divide the optimizer's state and work among the processes");
  app.add_flag("--shuffle,!--no-shuffle", o.shuffle, "a new order of the data in each epoch (default), or file order");
  app.add_option("--seed", o.seed, "of the initial weights and the order of the data")
      ->check(number_from(0, std::int64_t{1} << 53))
      ->capture_default_str();
  app.add_option("--data", o.data,
                 "folder of the four IDX files (default: where Debian's dataset-fashion-mnist puts them)")
      ->type_name("DIR");
  auto* save =
      app.add_option("--save", o.save, "write model, optimizer and progress here at the end")->type_name("FILE");
  app.add_option("--save-every", o.save_every, "also write it after every so many steps")
      ->check(number_from(1))
      ->type_name("STEPS")
      ->needs(save);
  app.add_option("--check-every", o.check_every,
                 "dp, ddp: after every so many steps compare the weights of all devices or processes, bit by bit")
      ->check(number_from(1))
      ->type_name("STEPS");
  app.add_option("--resume", o.resume,
                 "go on from a file written by --save; a job that was started again takes that of --save")
      ->type_name("FILE");
  app.add_option("--log", o.log, "write a line of JSON for each epoch here")->type_name("FILE");
  app.add_option("--trace", o.trace, "write a timeline of the steps here, for Perfetto")->type_name("FILE");
  app.add_flag("--quiet", o.quiet, "print nothing but errors");
  try {
    app.parse(argc, argv);
    if (o.nproc > 0 && o.parallel != "ddp") throw CLI::ValidationError("--nproc", "is for --parallel ddp");
    if (!o.backend.empty() && o.parallel != "ddp") throw CLI::ValidationError("--backend", "is for --parallel ddp");
    if (o.zero && o.parallel != "ddp") throw CLI::ValidationError("--zero", "is for --parallel ddp");
    if (o.comm_hook != "none" && o.parallel != "ddp")
      throw CLI::ValidationError("--comm-hook", "is for --parallel ddp");
    if (app.count("--powersgd-rank") > 0 && o.comm_hook != "powersgd")
      throw CLI::ValidationError("--powersgd-rank", "is for --comm-hook powersgd");
    const bool on_gpu = tandem::Device(o.device).is_cuda();
    if (o.parallel != "none" && o.device.find(':') != std::string::npos)
      throw CLI::ValidationError(
          "--device",
          fmt::format("{} is one device, and --parallel {} takes several by itself; give {}", o.device, o.parallel,
                      on_gpu ? "cuda, and name those that it may see in CUDA_VISIBLE_DEVICES" : "cpu"));
    if (o.reproducible > 0 && on_gpu)
      throw CLI::ValidationError("--reproducible", "is for --device cpu: sums of GPUs have orders of their own");
    if (o.devices > 0 && o.parallel != "dp") throw CLI::ValidationError("--devices", "is for --parallel dp");
    if (o.check_every > 0 && o.parallel == "none")
      throw CLI::ValidationError("--check-every", "is for --parallel dp and ddp");
    if (same_file(o.save, o.log)) throw CLI::ValidationError("--log", "names the file of --save; give another");
    if (same_file(o.save, o.trace)) throw CLI::ValidationError("--trace", "names the file of --save; give another");
    if (same_file(o.log, o.trace)) throw CLI::ValidationError("--trace", "names the file of --log; give another");
    if (o.graph && (!on_gpu || o.parallel != "none" || o.reproducible > 0))
      throw CLI::ValidationError("--graph", "is for --device cuda without --parallel and --reproducible");
    if (o.momentum > 0 && o.optimizer != "sgd") throw CLI::ValidationError("--momentum", "is for --optimizer sgd");
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);
    return code == 0 ? 0 : 2;
  }
  return -1;
}
