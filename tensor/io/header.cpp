#include <tandem/tensor/io/header.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace tandem::safetensors {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, kDTypeCount> kDTypeNames = {"F32", "F64",  "I64",  "I32",
                                                                   "U8",  "BOOL", "BF16", "F16"};

// Walks over the text and tells how far the parser has read.
struct Cursor {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;
  const char* at;
  const char** furthest;
  const char& operator*() const { return *at; }
  Cursor& operator++() {
    *furthest = ++at;
    return *this;
  }
  friend bool operator==(const Cursor& a, const Cursor& b) { return a.at == b.at; }
};

// Takes the parser's events. Only the one nesting that the format has is accepted, so that no document tree is built
// and depth needs no limit of its own.
class Handler {
 public:
  Handler(std::string_view text, std::uint64_t data_bytes, const std::string& file)
      : text_(text), furthest_(text.data()), data_bytes_(data_bytes), file_(file) {}

  Header parse() {
    json::sax_parse(Cursor{text_.data(), &furthest_}, Cursor{text_.data() + text_.size(), &furthest_}, this);
    return std::move(header_);
  }

  bool key(std::string& key) {
    switch (place_) {
      case Place::top:
        if (!names_.insert(key).second) fail_here("the name {} occurs twice", shown(key));
        entry_ = {.name = std::move(key), .dtype = float32, .shape = {}, .position = here()};
        break;
      case Place::metadata:
        metadata_key_ = std::move(key);
        if (header_.metadata.contains(metadata_key_)) fail_here("the metadata {} occurs twice", shown(metadata_key_));
        break;
      default: {
        const auto* const field = std::find(kFields.begin(), kFields.end(), key);
        if (field == kFields.end()) fail_here("{} has the unknown field {}", shown(entry_.name), shown(key));
        field_ = static_cast<std::size_t>(field - kFields.begin());
        if (std::exchange(seen_[field_], true)) fail_here("the {} of {} occurs twice", key, shown(entry_.name));
      }
    }
    return true;
  }
  bool start_object(std::size_t) {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = entry_.name == "__metadata__" ? Place::metadata : Place::entry;
      seen_ = {};
    } else {
      unexpected("an object");
    }
    return true;
  }
  bool end_object() {
    if (place_ == Place::entry) finish_entry();
    place_ = Place::top;
    return true;
  }
  bool start_array(std::size_t) {
    if (place_ != Place::entry || field_ == kDType) unexpected("a list");
    place_ = Place::list;
    offsets_ = 0;
    return true;
  }
  bool end_array() {
    if (field_ == kOffsets && offsets_ != 2) fail_here("{} needs two data_offsets", shown(entry_.name));
    place_ = Place::entry;
    return true;
  }
  bool string(std::string& value) {
    if (place_ == Place::metadata) {
      header_.metadata.emplace(std::move(metadata_key_), std::move(value));
    } else if (place_ == Place::entry && field_ == kDType) {
      const auto* const known = std::find(kDTypeNames.begin(), kDTypeNames.end(), value);
      if (known == kDTypeNames.end())
        fail("load", "{}, byte {}: {} has the dtype {}, which is not supported; convert it to one of {}", file_, here(),
             shown(entry_.name), shown(value), fmt::format("{}", fmt::join(kDTypeNames, ", ")));
      entry_.dtype = static_cast<DType>(known - kDTypeNames.begin());
    } else {
      unexpected("a string");
    }
    return true;
  }
  bool number_unsigned(std::uint64_t value) {
    if (place_ != Place::list) unexpected("a number");
    if (field_ == kOffsets) {
      if (offsets_ == 2) fail_here("{} needs two data_offsets", shown(entry_.name));
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    if (value > INT64_MAX) fail_here("{} has a size of {}, which is too large", shown(entry_.name), value);
    if (entry_.shape.dim() == kMaxDims)
      fail("load", "{}, byte {}: {} has more than {} dimensions, which is not supported; reshape it before saving it",
           file_, here(), shown(entry_.name), kMaxDims);
    entry_.shape.push_back(static_cast<int64_t>(value));
    return true;
  }
  bool number_integer(std::int64_t value) { fail_here("{} has the negative number {}", shown(entry_.name), value); }
  bool number_float(double, const std::string& text) { return unexpected(shown(text)); }
  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a truth value"); }
  bool binary(json::binary_t&) { return unexpected("binary data"); }
  bool parse_error(std::size_t, const std::string&, const json::exception&) {
    fail_here("the header is not valid JSON");
  }

 private:
  enum class Place { outside, top, metadata, entry, list };
  static constexpr std::array<std::string_view, 3> kFields = {"dtype", "shape", "data_offsets"};
  static constexpr std::size_t kDType = 0, kOffsets = 2;

  std::uint64_t here() const { return 8 + static_cast<std::uint64_t>(furthest_ - text_.data()); }
  template <class... A>
  [[noreturn]] void fail_here(fmt::format_string<const A&...> message, const A&... args) {
    fail_at(file_, here(), "{}", fmt::format(message, args...));
  }
  bool unexpected(std::string_view found) {
    constexpr std::array<const char*, 3> kExpected = {"a string", "a list of whole numbers", "two whole numbers"};
    if (place_ == Place::metadata) fail_here("metadata must be strings, but there is {}", found);
    if (place_ == Place::outside || place_ == Place::top)
      fail_here("an object with dtype, shape and data_offsets is expected, but there is {}", found);
    fail_here("the {} of {} must be {}, but there is {}", kFields[field_], shown(entry_.name), kExpected[field_],
              found);
  }

  void finish_entry() {
    for (std::size_t i = 0; i < kFields.size(); ++i)
      if (!seen_[i]) fail_here("{} has no {}", shown(entry_.name), kFields[i]);
    // Sizes of 0 count as 1 here, because strides are products too.
    int64_t product = 1, bytes = 0;
    bool overflow = false;
    for (const int64_t size : entry_.shape)
      overflow |= __builtin_mul_overflow(product, std::max<int64_t>(size, 1), &product);
    overflow |= __builtin_mul_overflow(product, static_cast<int64_t>(size_of(entry_.dtype)), &bytes);
    if (overflow) fail_here("the shape {} of {} is too large", entry_.shape, shown(entry_.name));
    if (std::count(entry_.shape.begin(), entry_.shape.end(), 0) > 0) bytes = 0;
    if (entry_.begin > entry_.end)
      fail_here("{} ends at {} before it begins at {}", shown(entry_.name), entry_.end, entry_.begin);
    if (entry_.end > data_bytes_)
      fail_here("{} needs data up to {}, but the file has {} bytes of data", shown(entry_.name), entry_.end,
                data_bytes_);
    if (entry_.end - entry_.begin != static_cast<std::uint64_t>(bytes))
      fail_here("{} of shape {} needs {} bytes, but has {}", shown(entry_.name), entry_.shape, bytes,
                entry_.end - entry_.begin);
    header_.entries.push_back(std::move(entry_));
  }

  std::string_view text_;
  const char* furthest_;
  std::uint64_t data_bytes_;
  const std::string& file_;
  Header header_;
  std::unordered_set<std::string> names_;
  Place place_ = Place::outside;
  Entry entry_;
  std::string metadata_key_;
  std::array<bool, 3> seen_{};
  std::size_t field_ = 0;
  int offsets_ = 0;
};

}  // namespace

Header parse_header(std::string_view json_text, std::uint64_t data_bytes, const std::string& file) {
  // The parser would skip a byte-order mark and stop at a zero byte; the format allows neither.
  if (json_text.empty() || json_text.front() != '{') fail_at(file, 8, "the header does not start with {{");
  if (const std::size_t zero = json_text.find('\0'); zero != std::string_view::npos)
    fail_at(file, 8 + zero, "the header has a zero byte");
  Header header = Handler(json_text, data_bytes, file).parse();

  std::vector<const Entry*> order;
  for (const Entry& entry : header.entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(),
            [](const Entry* a, const Entry* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
  std::uint64_t covered = 0;
  for (const Entry* entry : order) {
    if (entry->begin != covered)
      fail_at(file, entry->position, "the data of {} begins at {}, but what lies before it ends at {}",
              shown(entry->name), entry->begin, covered);
    covered = entry->end;
  }
  if (covered != data_bytes)
    fail_at(file, 8 + json_text.size() + covered, "the last tensor ends here, but {} more bytes follow",
            data_bytes - covered);
  return header;
}

std::string format_header(const Header& header) {
  const auto text = [](const std::string& s) {
    try {
      return json(s).dump();
    } catch (const json::exception&) {
      fail("save", "the name or metadata {} is not UTF-8; choose another", shown(s));
    }
  };
  std::string out = "{";
  if (!header.metadata.empty()) {
    out += "\"__metadata__\":{";
    const std::size_t start = out.size();
    for (const auto& [key, value] : header.metadata)
      out += fmt::format("{}{}:{}", out.size() > start ? "," : "", text(key), text(value));
    out += "}";
  }
  for (const Entry& entry : header.entries) {
    out += fmt::format(R"({}{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", out.size() > 1 ? "," : "",
                       text(entry.name), kDTypeNames[static_cast<std::size_t>(entry.dtype)],
                       fmt::join(entry.shape.begin(), entry.shape.end(), ","), entry.begin, entry.end);
  }
  return out + "}";
}

std::string shown(std::string_view name) {
  std::size_t length = std::min<std::size_t>(name.size(), 80);
  while (length < name.size() && length > 0 && (name[length] & 0xc0) == 0x80) --length;  // not inside a character
  std::string out = "\"" + std::string(name.substr(0, length)) + (length < name.size() ? "...\"" : "\"");
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return out;
}

}  // namespace tandem::safetensors
