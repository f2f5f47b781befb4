#include <tandem/parallel/consistency.h>

#include <algorithm>
#include <cstring>

#include <fmt/ranges.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/bucket.h>
#include <tandem/parallel/zero.h>
#include <tandem/tensor/create.h>

namespace tandem::parallel {
namespace {

// Something that should be alike on all ranks: what it is called, what it looks like, and its contents, if they count.
struct Entry {
  std::string name, look;
  Tensor contents = {};
};

// Dense, in memory that the host reads.
Tensor readable(const Tensor& t) { return t.detach().to(Device()).contiguous(); }

std::span<const std::byte> bytes_of(const Tensor& t) {
  return {static_cast<const std::byte*>(t.raw().data), static_cast<std::size_t>(t.numel()) * size_of(t.dtype())};
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  const Tensor x = readable(a), y = readable(b);
  return std::ranges::equal(bytes_of(x), bytes_of(y));
}

std::uint64_t hash(std::span<const std::byte> bytes, std::uint64_t h) {
  auto mix = [&](std::uint64_t word) {
    h = (h ^ word) * 0x9E3779B97F4A7C15;
    h ^= h >> 32;
  };
  mix(bytes.size());
  for (; !bytes.empty(); bytes = bytes.subspan(std::min<std::size_t>(8, bytes.size()))) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), std::min<std::size_t>(8, bytes.size()));
    mix(word);
  }
  return h;
}

// A line for each entry.
std::vector<std::string> lines_of(const std::vector<Entry>& entries) {
  std::vector<std::string> lines;
  for (const Entry& entry : entries) {
    std::string line = fmt::format("{}: {}", entry.name, entry.look);
    if (entry.contents.defined()) line += fmt::format("\t{:016x}", hash(bytes_of(readable(entry.contents)), 0));
    lines.push_back(std::move(line));
  }
  return lines;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1)
    parts.push_back(text.substr(begin, end - begin));
  return parts;
}

Tensor to_tensor(const std::string& text, std::int64_t size) {
  Tensor t = zeros({size}, {.dtype = uint8});
  std::memcpy(t.data<std::uint8_t>(), text.data(), text.size());
  return t;
}
std::string to_text(const Tensor& t) {
  return {reinterpret_cast<const char*>(t.const_data<std::uint8_t>()), static_cast<std::size_t>(t.numel())};
}

std::vector<std::int64_t> gather_numbers(ProcessGroup& group, std::int64_t mine) {
  Tensor all = zeros({group.size()}, {.dtype = int64});
  group.all_gather(all, full({1}, mine, {.dtype = int64})).wait();
  return all.to_vector<std::int64_t>();
}

// Every rank's text.
std::vector<std::string> gather_texts(ProcessGroup& group, const std::string& mine) {
  const std::vector<std::int64_t> sizes = gather_numbers(group, static_cast<std::int64_t>(mine.size()));
  const std::int64_t longest = std::max<std::int64_t>(1, *std::max_element(sizes.begin(), sizes.end()));
  Tensor all = zeros({group.size(), longest}, {.dtype = uint8});
  group.all_gather(all, to_tensor(mine, longest)).wait();
  std::vector<std::string> texts;
  for (int r = 0; r < group.size(); ++r)
    texts.push_back(
        to_text(all[r].contiguous()).substr(0, static_cast<std::size_t>(sizes[static_cast<std::size_t>(r)])));
  return texts;
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

// Two ranks have different contents for an entry that looks alike. All ranks get both, and say the same.
std::string difference(ProcessGroup& group, const Entry& entry, int other) {
  const Tensor mine = readable(entry.contents);
  const auto size = static_cast<std::int64_t>(bytes_of(mine).size());
  std::vector<Tensor> both;
  for (const int root : {0, other}) {
    Tensor bytes = empty({size}, {.dtype = uint8});
    std::memcpy(bytes.data<std::uint8_t>(), mine.raw().data, static_cast<std::size_t>(size));
    group.broadcast(bytes, root).wait();
    Tensor values = empty(mine.shape(), {.dtype = mine.dtype()});
    std::memcpy(values.raw_for_write().data, bytes.raw().data, static_cast<std::size_t>(size));
    both.push_back(values);
  }
  const auto a = bytes_of(both[0]), b = bytes_of(both[1]);
  const auto at = std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin();
  const auto index = static_cast<std::int64_t>(static_cast<std::size_t>(at) / size_of(mine.dtype()));
  return fmt::format("{} of {} is {} on rank 0, but {} on rank {}", place(index, mine.shape()), entry.name,
                     value_text(both[0], index), value_text(both[1], index), other);
}

// CommError on every rank unless all have the same entries.
void compare(ProcessGroup& group, const std::vector<Entry>& entries, const char* advice) {
  if (group.size() == 1) return;
  const NoGradGuard no_grad;
  const std::vector<std::string> mine = lines_of(entries);
  std::string text;
  for (const std::string& line : mine) text += line + '\n';
  const auto digest = static_cast<std::int64_t>(hash(std::as_bytes(std::span(text)), 0));
  const std::vector<std::int64_t> digests = gather_numbers(group, digest);
  const auto odd = std::find_if(digests.begin(), digests.end(), [&](std::int64_t d) { return d != digests.front(); });
  if (odd == digests.end()) return;
  const int other = static_cast<int>(odd - digests.begin());
  const std::vector<std::string> texts = gather_texts(group, text);
  std::vector<std::string> first = split(texts.front(), '\n'),
                           second = split(texts[static_cast<std::size_t>(other)], '\n');
  std::size_t at = 0;
  while (at < first.size() && at < second.size() && first[at] == second[at]) ++at;
  auto look = [&](const std::vector<std::string>& lines) {
    return at < lines.size() ? lines[at].substr(0, lines[at].find('\t')) : std::string("nothing more");
  };
  const bool alike = look(first) == look(second);
  const std::string what = alike ? difference(group, entries[at], other)
                                 : fmt::format("rank 0 has {}, where rank {} has {}", look(first), other, look(second));
  throw CommError(other,
                  fmt::format("rank {} of {}: the ranks differ: {}; {}", group.rank(), group.size(), what, advice));
}

void add(std::vector<Entry>& entries, const char* kind, const NamedTensors& tensors, bool contents) {
  for (const auto& [name, t] : tensors)
    entries.push_back(
        {fmt::format("{} '{}'", kind, name), fmt::format("{} {}", t.dtype(), t.shape()), contents ? t : Tensor()});
}

std::vector<Entry> entries_of(const nn::Module& model, bool contents, bool buffers) {
  std::vector<Entry> entries;
  add(entries, "parameter", model.named_parameters(), contents);
  const std::vector<Tensor> parameters = model.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (!parameters[i].requires_grad()) entries[i].look += ", frozen";
  if (buffers) add(entries, "buffer", model.named_buffers(), contents);
  return entries;
}

constexpr const char* kSameModel = "build and wrap the same model on every rank";
constexpr const char* kSameState =
    "what one rank alone has changed or loaded must reach the others, as with broadcast_state";

std::shared_ptr<ProcessGroup> or_default(const std::shared_ptr<ProcessGroup>& group) {
  return group ? group : default_group();
}

}  // namespace

void verify_structure(const nn::Module& model, ProcessGroup& group,
                      const std::vector<std::pair<std::string, std::string>>& options) {
  std::vector<Entry> entries;
  for (const auto& [name, value] : options) entries.push_back({fmt::format("option {}", name), value});
  for (Entry& entry : entries_of(model, false, true)) entries.push_back(std::move(entry));
  compare(group, entries, kSameModel);
}

void verify_alike(const std::vector<std::pair<std::string, std::string>>& values, ProcessGroup& group,
                  const char* advice) {
  std::vector<Entry> entries;
  for (const auto& [name, value] : values) entries.push_back({name, value});
  compare(group, entries, advice);
}

void check_consistency(const nn::Module& model, const optim::Optimizer& optimizer,
                       const std::shared_ptr<ProcessGroup>& group) {
  std::vector<Entry> entries = entries_of(model, true, true);
  add(entries, "optimizer state", optimizer.state_dict(), true);
  compare(*or_default(group), entries, kSameState);
}

void check_consistency(const nn::Module& model, const std::shared_ptr<ProcessGroup>& group) {
  compare(*or_default(group), entries_of(model, true, true), kSameState);
}

void check_before_first_step(const nn::Module& model, const Stateful& optimizer, ProcessGroup& group) {
  std::vector<Entry> entries = entries_of(model, true, false);
  add(entries, "optimizer state", optimizer.state_dict(), true);
  compare(group, entries, kSameState);
}

void broadcast_tensors(const std::vector<Tensor>& tensors, int root, ProcessGroup& group) {
  if (group.size() == 1) return;
  const NoGradGuard no_grad;
  constexpr std::int64_t kPiece = 16 << 20;
  std::vector<BucketItem> items;  // without devices, which the ranks choose for themselves
  for (const Tensor& t : tensors)
    items.push_back({.bytes = t.numel() * static_cast<std::int64_t>(size_of(t.dtype())), .dtype = t.dtype()});
  const std::int64_t caps[] = {kPiece};
  for (const std::vector<std::size_t>& members : plan_buckets(items, caps)) {
    const Tensor& first = tensors[members.front()];
    std::int64_t count = 0;
    for (const std::size_t i : members) count += tensors[i].numel();
    Tensor piece = empty({count}, {.dtype = first.dtype(), .device = first.device()});
    std::vector<Tensor> parts;
    std::int64_t at = 0;
    for (const std::size_t i : members) {
      parts.push_back(piece.narrow(0, at, tensors[i].numel()).view(tensors[i].shape()));
      at += tensors[i].numel();
      if (group.rank() == root) parts.back().copy_(tensors[i]);
    }
    group.broadcast(piece, root).wait();
    if (group.rank() == root) continue;
    for (std::size_t k = 0; k < members.size(); ++k) {
      Tensor t = tensors[members[k]];
      if (!same_bytes(t, parts[k])) t.copy_(parts[k]);
    }
  }
}

void broadcast_state(Stateful& state, const std::shared_ptr<ProcessGroup>& given) {
  const NoGradGuard no_grad;
  check(dynamic_cast<const ZeroRedundancyOptimizer*>(&state) == nullptr, "broadcast_state",
        "the state of a ZeroRedundancyOptimizer is divided among the ranks; load the file on every rank");
  const std::shared_ptr<ProcessGroup> group = or_default(given);
  const bool root = group->rank() == 0;
  NamedTensors entries = root ? state.state_dict() : NamedTensors();
  // Rank 0 says what there is: for each entry its name, type and sizes.
  std::string text;
  for (const auto& [name, t] : entries)
    text += fmt::format("{}\t{}\t{}\n", name, static_cast<int>(t.dtype()), fmt::join(t.shape(), " "));
  text = gather_texts(*group, text).front();
  if (!root)
    for (const std::string& line : split(text, '\n')) {
      const std::vector<std::string> fields = split(line + '\t', '\t');
      std::vector<std::int64_t> sizes;
      for (const std::string& size : split(fields[2] + ' ', ' '))
        if (!size.empty()) sizes.push_back(std::stoll(size));
      entries.emplace_back(fields[0], zeros(Shape(sizes), {.dtype = static_cast<DType>(std::stoi(fields[1]))}));
    }
  std::vector<Tensor> tensors;
  for (const auto& entry : entries) tensors.push_back(entry.second);
  broadcast_tensors(tensors, 0, *group);
  std::string problems;
  if (!root) problems = fmt::format("{}", fmt::join(state.state_problems(entries), "; "));
  const std::vector<std::string> all = gather_texts(*group, problems);
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].empty())
      throw CommError(static_cast<int>(r), fmt::format("rank {} of {}: rank {} cannot take over rank 0's {}: {}",
                                                       group->rank(), group->size(), r, state.state_name(), all[r]));
  if (!root) state.load_state_dict(entries);
}

}  // namespace tandem::parallel
