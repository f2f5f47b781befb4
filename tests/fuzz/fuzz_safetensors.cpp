// Reads arbitrary bytes as a safetensors file: it is an Error or gives tensors whose every byte can be read.
#include <cstddef>
#include <cstdint>
#include <numeric>

#include <tandem/tensor/io/safetensors.h>

static volatile double sink;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const tandem::Safetensors file = tandem::parse_safetensors(std::as_bytes(std::span(data, size)));
    std::size_t bytes = 0;
    for (const auto& [name, t] : file.tensors) {
      if (t.dim() > tandem::kMaxDims) __builtin_trap();
      const std::vector<double> values = t.to_vector<double>();
      sink = std::accumulate(values.begin(), values.end(), 0.0);
      bytes += static_cast<std::size_t>(t.numel()) * tandem::size_of(t.dtype());
    }
    if (bytes > size) __builtin_trap();
  } catch (const tandem::Error&) {
  }
  return 0;
}
