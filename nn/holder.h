// Holder: nn::Linear is a Holder<LinearImpl>, a shared pointer that is made and called like the module itself.
#pragma once
#include <concepts>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <tandem/tensor/tensor.h>

namespace tandem::nn {

/// A handle to a module, which its copies share; `->` and a call reach the module.
template <class Impl>
class Holder {
 public:
  /// An empty handle, to be assigned to later: `nn::Linear fc{nullptr};`
  Holder(std::nullptr_t) {}
  Holder(std::shared_ptr<Impl> module) : module_(std::move(module)) {}
  /// A new module, made from the arguments of its constructor.
  template <class... A>
  requires(std::is_constructible_v<Impl, A...> &&
           !(sizeof...(A) == 1 &&
             (std::derived_from<std::remove_cvref_t<A>, Holder> || ...))) explicit Holder(A&&... arguments)
      : module_(std::make_shared<Impl>(std::forward<A>(arguments)...)) {}

  const std::shared_ptr<Impl>& ptr() const { return module_; }
  template <class Base>
  requires std::derived_from<Impl, Base>
  operator std::shared_ptr<Base>() const { return module_; }
  explicit operator bool() const { return module_ != nullptr; }
  /// The module; an empty handle throws Error.
  Impl* get() const {
    check(module_ != nullptr, "nn",
          "this module handle is empty; assign to it first, as in fc = register_module(\"fc\", nn::Linear(2, 3))");
    return module_.get();
  }
  Impl* operator->() const { return get(); }
  Impl& operator*() const { return *get(); }
  Tensor operator()(const Tensor& x) const { return (*get())(x); }
  std::vector<Tensor> operator()(std::initializer_list<Tensor> inputs) const { return (*get())(inputs); }
  std::vector<Tensor> operator()(const std::vector<Tensor>& inputs) const { return (*get())(inputs); }
  std::string str() const { return module_ ? module_->str() : "(empty)"; }

 private:
  std::shared_ptr<Impl> module_;
};

namespace detail {
template <class Impl>
void as_holder(const Holder<Impl>* holder);
}  // namespace detail
template <class T>
concept ModuleHolder = requires(const T* t) {
  detail::as_holder(t);
};

}  // namespace tandem::nn

template <tandem::nn::ModuleHolder T>
struct fmt::formatter<T> : tandem::StrFormatter<T> {};
