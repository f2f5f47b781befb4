#include <tandem/tensor/open_module.h>

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>

namespace tandem {
namespace {

std::filesystem::path beside_library(const char* file) {
  Dl_info about{};
  const bool known = dladdr(reinterpret_cast<const void*>(&open_module), &about) != 0 && about.dli_fname != nullptr;
  return known ? std::filesystem::path(about.dli_fname).parent_path() / file : std::filesystem::path(file);
}

}  // namespace

void* open_module(const char* file, const char* variable, const char* entry, std::string& reason) {
  const char* named = std::getenv(variable);
  if (named != nullptr && *named == '\0') named = nullptr;
  std::string path = named != nullptr ? named : beside_library(file).string();
  if (named == nullptr && !std::filesystem::exists(path)) path = file;
  void* const module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) {
    reason = dlerror();
    return nullptr;
  }
  void* const found = dlsym(module, entry);
  if (found == nullptr)
    reason = fmt::format("'{}' is no module of this version of Tandem: it has no function {}", path, entry);
  return found;
}

}  // namespace tandem
