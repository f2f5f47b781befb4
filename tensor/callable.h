// Callables without <functional>, which is slow to compile: one that owns what it calls, one that refers to it.
#pragma once
#include <memory>
#include <type_traits>
#include <utility>

namespace tandem {

template <class Signature>
class UniqueFunction;

/// Owns any callable of this signature; movable, not copyable.
template <class R, class... A>
class UniqueFunction<R(A...)> {
 public:
  UniqueFunction() = default;
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, UniqueFunction> && std::is_invocable_r_v<R, F&, A...>)
      UniqueFunction(F&& f)
      : target_(std::make_unique<Target<std::decay_t<F>>>(std::forward<F>(f))) {}
  R operator()(A... args) const { return target_->call(std::forward<A>(args)...); }
  explicit operator bool() const { return target_ != nullptr; }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual R call(A... args) = 0;
  };
  template <class F>
  struct Target final : Base {
    explicit Target(F f) : f_(std::move(f)) {}
    R call(A... args) override { return f_(std::forward<A>(args)...); }
    F f_;
  };
  std::unique_ptr<Base> target_;
};

template <class Signature>
class FunctionRef;

/// Refers to a callable that outlives the call it is passed to.
template <class R, class... A>
class FunctionRef<R(A...)> {
 public:
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, FunctionRef> && std::is_invocable_r_v<R, F&, A...>)
      FunctionRef(F&& f)
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, A... args) -> R {
          return (*static_cast<std::remove_reference_t<F>*>(object))(std::forward<A>(args)...);
        }) {}
  R operator()(A... args) const { return call_(object_, std::forward<A>(args)...); }

 private:
  void* object_;
  R (*call_)(void*, A...);
};

}  // namespace tandem
