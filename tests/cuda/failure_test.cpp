// What goes wrong with CUDA: no module, no driver, no device, forks, too little memory, a lost device, ends of threads
// and of the program. Each in a process of its own; in each the CPU goes on working.
#include <tandem/tests/support/test.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include <tandem/data/loader.h>
#include <tandem/nn/layers.h>
#include <tandem/nn/loss.h>
#include <tandem/optim/sgd.h>
#include <tandem/tensor/cuda.h>
#include <tandem/tensor/random.h>
#include <tandem/tensor/threads.h>
#include <tandem/tests/cuda_double/children.h>

namespace tandem {
namespace {

using cuda_double_test::Child;
using cuda_double_test::Outcome;
using test::contains;
using Variables = std::vector<std::pair<std::string, std::string>>;

const Device kFirst{DeviceType::cuda, 0};

void tell(const std::string& text) { fmt::print(stderr, "{}\n", text); }
template <class Body>
void tell_error(Body&& body) {
  tell(test::error_of(body));
}

struct Net : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(8, 256));
  nn::Linear last = register_module("last", nn::Linear(256, 3));
  Tensor forward(const Tensor& x) override { return last(tanh(first(x))); }
};

// The losses of a few steps.
std::vector<double> train(Device device, int64_t rows = 12) {
  manual_seed(5);
  Net net;
  const Tensor x = randn({rows, 8}).to(device), y = randint(0, 3, {rows}).to(device);
  net.to(device);
  optim::SGD optimizer(net.parameters(), {.lr = 0.1});
  const nn::CrossEntropyLoss criterion;
  std::vector<double> losses;
  for (int step = 0; step < 4; ++step) {
    const Tensor loss = criterion(net(x), y);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

// The status of a child.
int end_of(bool right) { return right ? 0 : 3; }

bool close(const std::vector<double>& a, const std::vector<double>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (std::abs(a[i] - b[i]) > 1e-5 * b[i]) return false;
  return a.size() == b.size();
}
bool cpu_works() {
  set_num_threads(1);  // a forked process has the threads of none
  const std::vector<double> losses = train(Device());
  return losses.back() < losses.front();
}

const Child kUnavailable("unavailable", [] {
  tell(cuda::unavailable_reason());
  tell_error([] { zeros({2}, {.device = kFirst}); });
  tell_error([] { Net().to(kFirst); });
  tell_error([] { cuda::pin_memory(ones({2})); });
  tell_error([] { cuda::set_allow_tf32(true); });
  tell_error([] { cuda::synchronize(); });
  tell_error([] { cuda::properties(); });
  tell_error([] { data::DataLoader(data::TensorDataset(ones({2})), {.pin_memory = true}); });
  const bool none = !cuda::is_available() && cuda::device_count() == 0 && !cuda::is_pinned(ones({2})) &&
                    !cuda::allow_tf32() && device_count(DeviceType::cuda) == 0;
  return end_of(none && cpu_works());
});

void check_unavailable(const Variables& variables, const std::vector<std::string>& parts) {
  const Outcome found = cuda_double_test::run_child("unavailable", variables);
  CHECK(found.status == 0);
  const std::string reason = found.text.substr(0, found.text.find('\n'));
  for (const std::string& part : parts) CHECK(contains(reason, part));
  std::string expected = reason + "\n";
  for (const char* op :
       {"[empty] {0} does not exist: {1}; use \"cpu\"\n", "[to] {0} does not exist: {1}; use \"cpu\"\n",
        "[pin_memory] page-locked memory is CUDA's, which cannot be used: {1}\n",
        "[set_allow_tf32] CUDA cannot be used: {1}\n", "[synchronize] {0} does not exist: {1}; use \"cpu\"\n",
        "[properties] {0} does not exist: {1}; use \"cpu\"\n",
        "[DataLoader] pin_memory is for copies to a CUDA device, and there is none: {1}; leave it out\n"})
    expected += fmt::format(fmt::runtime(op), "cuda:0", reason);
  CHECK(found.text == expected);
}

TEST_CASE("cuda: without a module") {
  check_unavailable(
      {{"TANDEM_CUDA_MODULE", "/nowhere/module.so"}},
      {"Tandem was built without CUDA, or its module cannot be opened: /nowhere/module.so", "No such file"});
  check_unavailable({{"TANDEM_CUDA_MODULE", "/etc/passwd"}}, {"its module cannot be opened: /etc/passwd"});
  check_unavailable({{"TANDEM_CUDA_MODULE", "/tmp"}}, {"its module cannot be opened: /tmp"});
  check_unavailable({{"TANDEM_CUDA_MODULE", "libm.so.6"}},
                    {"'libm.so.6' is no module of this version of Tandem: it has no function tandem_cuda_module_"});
}

TEST_CASE("cuda: without a driver or a device") {
  check_unavailable({{"TANDEM_CUDA_DOUBLE_DEVICES", "nodriver"}}, {"no NVIDIA driver is installed"});
  check_unavailable(
      {{"TANDEM_CUDA_DOUBLE_DEVICES", "olddriver"}},
      {"the NVIDIA driver is too old: it serves CUDA 11.4, and Tandem was built with CUDA ", "update it"});
  unsetenv("CUDA_VISIBLE_DEVICES");
  check_unavailable({{"TANDEM_CUDA_DOUBLE_DEVICES", "0"}}, {"the NVIDIA driver finds no device"});
  check_unavailable({{"TANDEM_CUDA_DOUBLE_DEVICES", "0"}, {"CUDA_VISIBLE_DEVICES", ""}},
                    {"the NVIDIA driver finds no device (CUDA_VISIBLE_DEVICES is '')"});
}

const Child kForked("forked", [] {
  static Tensor kept = ones({3}, {.device = kFirst});  // freed when the forked process exits, too
  Tensor here = kept + 1;
  Tensor pinned = cuda::pin_memory(ones({3}));
  const pid_t process = fork();
  if (process == 0) {
    tell(cuda::unavailable_reason());
    tell_error([&] { here + 1; });
    tell_error([&] { here.to("cpu"); });
    tell_error([] { zeros({2}, {.device = kFirst}); });
    tell_error([&] { pinned.to(kFirst); });
    tell_error([] { memory_stats(kFirst); });
    tell_error([] { zeros({2}, {.device = "cuda:9"}); });
    tell_error([] { cuda::set_allow_tf32(true); });
    here = {};
    pinned = {};
    const bool works = cpu_works();
    std::exit(end_of(works));
  }
  int status = 0;
  waitpid(process, &status, 0);
  const bool child_right = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  return end_of(child_right && (here + 1).to_vector<float>() == std::vector<float>(3, 3) && cpu_works());
});

TEST_CASE("cuda: a process that was forked after its parent used CUDA") {
  const Outcome found = cuda_double_test::run_child("forked");
  CHECK(found.status == 0);
  const std::string reason =
      "this process was forked after CUDA was used, which CUDA does not allow; start it by exec (spawn does)";
  const std::string used = "[cuda] cuda:0 cannot be used: " + reason + "\n";
  CHECK(found.text == reason + "\n" + used + used + used + used + used +
                          "[empty] cuda:9 does not exist: CUDA devices are cuda:0 to cuda:3\n" +
                          "[set_allow_tf32] CUDA cannot be used: " + reason + "\n");
}

// A step of a model on so many rows. Says how far it came.
std::string step(Net& net, int64_t rows) {
  const char* phase = "forward";
  try {
    const Tensor x = ones({rows, 8}, {.device = kFirst}), y = zeros({rows}, {.dtype = int64, .device = kFirst});
    const Tensor loss = nn::CrossEntropyLoss()(net(x), y);
    phase = "backward";
    loss.backward();
    return "done";
  } catch (const Error& e) {
    return fmt::format("{}: {}", phase, e.what());
  }
}

const Child kMemory("memory", [] {
  Net net;
  net.to(kFirst);
  if (const std::string how = step(net, 8); how != "done") tell(how);  // makes what is made once
  net.zero_grad();
  const std::size_t before = memory_stats(kFirst).in_use;
  bool in_forward = false, in_backward = false;
  int64_t rows = 1 << 16;
  for (std::string how; how != "done"; rows = rows * 7 / 8) {
    how = step(net, rows);
    net.zero_grad();
    if (how != "done") {
      in_forward |= how.starts_with("forward");
      in_backward |= how.starts_with("backward");
      if (!contains(how, "[allocate] out of memory on cuda:0: ") ||
          !contains(how, " bytes were asked for; tensors use ") ||
          !contains(how, ", the workspaces of products 0, the pool holds ") ||
          !contains(how, "free; use a smaller batch or model"))
        tell(how);
    }
    if (const std::size_t after = memory_stats(kFirst).in_use; after != before)
      tell(fmt::format("{} rows, {}: {} bytes are used, and were {} before", rows, how, after, before));
  }
  tell(fmt::format("{} {}", in_forward, in_backward));
  return end_of(rows > 1000 && close(train(kFirst), train(Device())) && cpu_works());
});

TEST_CASE("cuda: too little memory in the middle of a step") {
  const Outcome found =
      cuda_double_test::run_child("memory", {{"TANDEM_CUDA_DOUBLE_MEMORY", "60000000"}, {"TANDEM_CUDA_TUNE", "0"}});
  CHECK(found.status == 0);
  CHECK(found.text == "true true\n");
}

const Child kLost("lost", [] {
  const Tensor kept = ones({3}, {.device = kFirst});
  tell_error([] {
    for (int i = 0; i < 100; ++i) train(kFirst);
  });
  tell(cuda::unavailable_reason());
  tell_error([&] { kept.to("cpu"); });
  tell_error([&] { zeros({2}, {.device = kFirst}); });
  return end_of(cpu_works());
});

TEST_CASE("cuda: a device that is lost in the middle of training") {
  const Outcome found = cuda_double_test::run_child("lost", {{"TANDEM_CUDA_DOUBLE_FAULT", "150"}});
  INFO(found.text);
  CHECK(found.status == 0);
  const std::string fault = "an illegal memory access was encountered (cudaErrorIllegalAddress)";
  const std::string reason = "CUDA failed in this process before: " + fault +
                             ", and works again only in a new one; start the program anew, from its last checkpoint\n";
  const std::string used = "[cuda] cuda:0 cannot be used: " + reason;
  CHECK(contains(found.text, "CUDA failed: " + fault + "; an error of a kernel may come from an earlier operation\n" +
                                 reason + used + used));
}

struct Statics {
  Tensor on_device, pinned;
  std::shared_ptr<Net> net;
};
Statics g_statics;

const Child kStatics("statics", []() -> int {
  static const Tensor inside = ones({1000}, {.device = kFirst}) * 2;
  g_statics.on_device = inside * 2;
  g_statics.pinned = cuda::pin_memory(ones({1000}));
  g_statics.net = std::make_shared<Net>();
  g_statics.net->to(kFirst);
  (*g_statics.net)(ones({2, 8}, {.device = kFirst}));
  const bool works = cpu_works();
  std::exit(end_of(works));  // while the device still works
});

TEST_CASE("cuda: tensors that are destroyed at the end of the program") {
  const Outcome found = cuda_double_test::run_child("statics");
  CHECK(found.status == 0);
  CHECK(found.text == "");
}

const Child kThreads("threads", [] {
  const std::size_t before = (train(kFirst), memory_stats(kFirst).in_use);
  Tensor left;
  for (int i = 0; i < 3; ++i) {
    std::thread([&] {
      thread_local Tensor own = ones({1000}, {.device = kFirst});
      const Tensor more = own * 2;
      left = more + 1;
      (void)train(kFirst);
    }).join();
    if (left.to_vector<float>() != std::vector<float>(1000, 3)) tell("a thread's result is lost");
  }
  left = {};
  const std::size_t after = memory_stats(kFirst).in_use;
  if (after != before) tell(fmt::format("{} bytes are used, and were {} before", after, before));
  return end_of(close(train(kFirst), train(Device())) && cpu_works());
});

TEST_CASE("cuda: threads that end with tensors") {
  const Outcome found = cuda_double_test::run_child("threads");
  CHECK(found.status == 0);
  CHECK(found.text == "");
}

}  // namespace
}  // namespace tandem
