// The command line of fashion_mnist.
#pragma once
#include <cstdint>
#include <string>

struct Options {
  std::string parallel = "none";   // none, dp, ddp
  int devices = 0;                 // of dp; 0: all there are, at least 2 on the CPU
  int nproc = 0;                   // of ddp: start that many processes; 0: started by tandem-run
  std::string backend;             // of ddp; empty: the best there is
  std::string comm_hook = "none";  // of ddp: how gradients travel
  int powersgd_rank = 1;
  std::string device = "cpu";  // or cuda; or, without --parallel, a certain one, as cuda:1
  bool graph = false;          // cuda: a whole step is captured and replayed
  int threads = 0;             // in all; 0: one a core
  int reproducible = 0;        // parts of a batch, for the same bits in every mode; 0: off
  std::int64_t epochs = 5;
  std::int64_t batch_size = 64;
  std::string optimizer = "sgd";
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;
  bool zero = false;  // ddp: the optimizer's state is divided among the processes
  bool shuffle = true;
  std::int64_t seed = 0;
  std::string data;
  std::string save, resume, log, trace;
  std::int64_t save_every = 0;
  std::int64_t check_every = 0;  // dp and ddp: steps between comparisons of the weights; 0: never
  bool quiet = false;
};

/// Reads the command line. Returns -1 to go on, else the exit code: 0 after --help, 2 after a mistake.
int parse_options(int argc, char** argv, Options& options);
