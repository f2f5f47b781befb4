#include <tandem/parallel/contents.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include <fmt/ranges.h>

#include <tandem/parallel/on_device.h>

namespace tandem::parallel {
namespace {

constexpr std::size_t kLanes = 8;
using Lanes = std::array<std::uint64_t, kLanes>;

// One to one in the word, and in what was before. The rotation brings high bits to where the product spreads them:
// without it, two changed signs would cancel.
std::uint64_t mix(std::uint64_t h, std::uint64_t word) { return std::rotl(h ^ word, 29) * 0x9E3779B97F4A7C15; }

void mix_block(Lanes& lanes, const std::byte* block) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, block + i * sizeof(word), sizeof(word));
    lanes[i] = mix(lanes[i], word);
  }
}

// "element (2, 3)"; a single number has no place to name.
std::string place(std::int64_t index, const Shape& shape) {
  if (shape.size() == 0) return "the value";
  std::vector<std::int64_t> at(shape.size());
  for (std::size_t d = shape.size(); d-- > 0; index /= shape[d]) at[d] = index % shape[d];
  return fmt::format("element ({})", fmt::join(at, ", "));
}

std::string value_text(const Tensor& t, std::int64_t index) {
  const Tensor element = t.reshape({-1})[index];
  if (t.dtype() == float64) return fmt::format("{}", element.item<double>());
  if (is_floating(t.dtype())) return fmt::format("{}", element.item<float>());
  return fmt::format("{}", element.item<std::int64_t>());
}

std::string bits_text(const Tensor& t, std::int64_t index) {
  const std::size_t size = size_of(t.dtype());
  const auto bytes = bytes_of(t).subspan(static_cast<std::size_t>(index) * size, size);
  std::string text = " (0x";
  for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte)
    text += fmt::format("{:02x}", static_cast<unsigned>(*byte));
  return text + ')';
}

}  // namespace

Tensor readable(const Tensor& t) { return on_device(t.detach(), Device()).contiguous(); }

std::span<const std::byte> bytes_of(const Tensor& t) {
  return {static_cast<const std::byte*>(t.raw().data), static_cast<std::size_t>(t.nbytes())};
}

// Several lanes, since the products of one would wait for each other.
std::uint64_t hash(std::span<const std::byte> bytes) {
  Lanes lanes;
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = i;
  const std::size_t whole = bytes.size() / sizeof(Lanes) * sizeof(Lanes);
  for (std::size_t at = 0; at < whole; at += sizeof(Lanes)) mix_block(lanes, bytes.data() + at);
  std::array<std::byte, sizeof(Lanes)> last{};
  if (whole < bytes.size()) std::memcpy(last.data(), bytes.data() + whole, bytes.size() - whole);
  mix_block(lanes, last.data());
  std::uint64_t h = bytes.size();
  for (const std::uint64_t lane : lanes) h = mix(h, lane ^ lane >> 32);
  return h ^ h >> 32;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = readable(a), y = readable(b);
  return std::ranges::equal(bytes_of(x), bytes_of(y));
}

std::optional<Difference> first_difference(const Tensor& a, const Tensor& b) {
  const Tensor x = readable(a), y = readable(b);
  const auto p = bytes_of(x), q = bytes_of(y);
  if (p.data() == q.data()) return std::nullopt;
  const auto at = std::mismatch(p.begin(), p.end(), q.begin(), q.end()).first - p.begin();
  if (static_cast<std::size_t>(at) == p.size()) return std::nullopt;
  const std::int64_t index = at / static_cast<std::int64_t>(size_of(x.dtype()));
  Difference found{place(index, x.shape()), value_text(x, index), value_text(y, index)};
  if (found.first == found.other) {
    found.first += bits_text(x, index);
    found.other += bits_text(y, index);
  }
  return found;
}

}  // namespace tandem::parallel
