// Checkpoints: safetensors files of one object's state, or of all that must be restored together in one file.
#pragma once
#include <concepts>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tandem/tensor/io/progress.h>
#include <tandem/tensor/io/state.h>

namespace tandem {

/// Refers to something that can be saved or loaded: made from the object itself, or from a pointer or holder of one.
/// {"name", object} gives it another name in the file, for two of a kind. S is Stateful or const Stateful.
template <class S>
class StateRef {
 public:
  template <class T>
  requires std::convertible_to<T*, S*> StateRef(T& object) : object_(&object) {}
  template <class P>
  requires requires(const P& p) {
    { p.operator->() } -> std::convertible_to<S*>;
  }
  StateRef(const P& pointer) : StateRef(static_cast<S*>(pointer.operator->())) {}
  /// Throws Error on a null pointer.
  StateRef(S* pointer) : object_(pointer) {
    check(pointer != nullptr, "checkpoint", "a null pointer was given; leave it out or make the object first");
  }
  StateRef(std::string name, const StateRef& other) : object_(other.object_), name_(std::move(name)) {}

  S& operator*() const { return *object_; }
  S* operator->() const { return object_; }
  /// What its entries are called in a file that holds several.
  std::string name() const { return name_.empty() ? object_->state_name() : name_; }

 private:
  S* object_;
  std::string name_;
};

/// How a file is loaded.
struct LoadOptions {
  /// Where the file's values are put on their way; what they are loaded into stays on its device.
  Device map_location = {};
  /// If false, entries that the file lacks keep their values, and those that only the file has are skipped.
  bool strict = true;
};

/// Writes the state of one object under its plain names ("0.weight"), for Python's safetensors package too. The file is
/// replaced as a whole: a kill or a full disk leaves the old one. Throws Error naming path and reason.
void save(const StateRef<const Stateful>& object, const std::string& path);
/// Writes several objects ("model.0.weight", "optimizer...") and the random state into one file:
/// save(path, {model, optimizer, scheduler, progress}).
void save(const std::string& path, const std::vector<StateRef<const Stateful>>& parts);

/// Restores an object from a file of its own, or from its part of a file with several. Throws Error with everything
/// that does not fit, and then nothing has changed.
void load(const StateRef<Stateful>& object, const std::string& path, const LoadOptions& options = {});
/// Restores several objects and the random state from a file with several, all or nothing; what else it holds is left.
void load(const std::string& path, const std::vector<StateRef<Stateful>>& parts, const LoadOptions& options = {});

}  // namespace tandem
