// What the tests share: doctest, and checks on tensors and error texts.
#pragma once
#include <doctest/doctest.h>

#include <string>

#include <tandem/autograd/functions.h>
#include <tandem/tensor/create.h>

namespace tandem::test {

/// The text of the Error that `body` throws, or "no error".
template <class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace tandem::test

/// Checks that `expression` throws Error with all of the given parts in its text.
#define CHECK_ERROR(expression, ...)                                                       \
  do {                                                                                     \
    const std::string error_text_ = ::tandem::test::error_of([&] { (void)(expression); }); \
    for (const char* part_ : {__VA_ARGS__}) {                                              \
      INFO(error_text_);                                                                   \
      CHECK(::tandem::test::contains(error_text_, part_));                                 \
    }                                                                                      \
  } while (false)
/// Checks that two tensors are close, printing both when they are not.
#define CHECK_CLOSE(a, b, tolerance)                         \
  do {                                                       \
    const ::tandem::Tensor a_ = (a), b_ = (b);               \
    INFO(a_.str(), "\n", b_.str());                          \
    CHECK(::tandem::allclose(a_, b_, tolerance, tolerance)); \
  } while (false)
