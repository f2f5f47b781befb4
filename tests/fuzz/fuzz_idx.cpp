// Fuzzes the IDX reader: any bytes give a tensor or an Error.
#include <tandem/data/idx.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    (void)tandem::data::read_idx(std::span(data, size), "fuzz");
  } catch (const tandem::Error&) {
  }
  return 0;
}
