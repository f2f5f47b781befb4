// Errors: every misuse throws tandem::Error with a sentence of the form "[op] what is wrong; what to do".
#pragma once
#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace tandem {

/// What every misuse of the library throws. The text names the operation, what is wrong with which shapes, and a
/// remedy.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws Error with "[op] " before the formatted message.
template <class... A>
[[noreturn]] void fail(std::string_view op, fmt::format_string<const A&...> message, const A&... args) {
  throw Error(fmt::format("[{}] {}", op, fmt::format(message, args...)));
}

/// Throws as `fail` does unless `ok`; the message is only formatted when it is needed.
template <class... A>
inline void check(bool ok, std::string_view op, fmt::format_string<const A&...> message, const A&... args) {
  if (!ok) [[unlikely]]
    fail(op, message, args...);
}

/// Prints to standard output with fmt's syntax; tensors, shapes and devices can be arguments.
template <class... A>
void print(std::string_view format, const A&... args) {
  fmt::print(fmt::runtime(format), args...);
}

// A formatter, for "{}" alone, of every type that has `std::string str() const`. (fmt's own for strings would need
// fmt/format.h, which is slow to compile.)
template <class T>
struct StrFormatter {
  template <class Context>
  constexpr auto parse(Context& context) {
    return context.begin();
  }
  template <class Context>
  auto format(const T& value, Context& context) const {
    auto out = context.out();
    for (const char c : value.str()) *out++ = c;
    return out;
  }
};

}  // namespace tandem
