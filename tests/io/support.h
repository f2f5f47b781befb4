// What the tests of files share: a directory of their own, bytes in and out, and a small Stateful.
#pragma once
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <tandem/tensor/io/state.h>
#include <tandem/tests/support/test.h>

namespace tandem::test {

/// A new directory that disappears with its object.
class Directory {
 public:
  Directory() {
    std::string name = (std::filesystem::temp_directory_path() / "tandem-io-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      out.push_back(entry.path().filename().string());
    return out;
  }

 private:
  std::filesystem::path path_;
};

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}
inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// Named tensors that are loaded as a module's are.
class Thing : public Stateful {
 public:
  Thing(std::string name, NamedTensors tensors) : name_(std::move(name)), tensors_(std::move(tensors)) {}
  std::string state_name() const override { return name_; }
  NamedTensors state_dict() const override { return tensors_; }
  std::vector<std::string> state_problems(const NamedTensors& state) const override {
    return state_mismatches(tensors_, state);
  }
  void load_state_dict(const NamedTensors& state) override {
    for (auto& [name, own] : tensors_)
      for (const auto& [given_name, given] : state)
        if (name == given_name) own.detach().copy_(given);
  }
  Tensor& operator[](std::size_t i) { return tensors_[i].second; }

 private:
  std::string name_;
  NamedTensors tensors_;
};

}  // namespace tandem::test
