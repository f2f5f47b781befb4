// The C++ half of read_with_python.py: reads the file that Python wrote and writes all of it again.
#include <cstdlib>

#include <tandem/tensor/io/safetensors.h>

#include "support.h"

TEST_CASE("child: copy a file for Python" * doctest::skip()) {
  const char *from = std::getenv("TANDEM_TEST_FROM"), *to = std::getenv("TANDEM_TEST_TO");
  REQUIRE(from != nullptr);
  REQUIRE(to != nullptr);
  const tandem::Safetensors file = tandem::read_safetensors(from);
  tandem::write_safetensors(to, file.tensors, file.metadata);
}
