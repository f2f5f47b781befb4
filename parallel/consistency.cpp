#include <tandem/parallel/consistency.h>

#include <algorithm>
#include <cstring>

#include <fmt/ranges.h>

#include <tandem/autograd/grad_mode.h>
#include <tandem/parallel/bucket.h>
#include <tandem/parallel/contents.h>
#include <tandem/parallel/zero.h>
#include <tandem/tensor/create.h>

namespace tandem::parallel {
namespace {

// Something that should be alike on all ranks: what it is called, what it looks like, and its contents, if they count.
struct Entry {
  std::string name, look;
  Tensor contents = {};
};

// A line for each entry.
std::vector<std::string> lines_of(const std::vector<Entry>& entries) {
  std::vector<std::string> lines;
  for (const Entry& entry : entries) {
    std::string line = fmt::format("{}: {}", entry.name, entry.look);
    if (entry.contents.defined()) line += fmt::format("\t{:016x}", hash(bytes_of(readable(entry.contents))));
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

// Ranks that have different contents for an entry that looks alike. All ranks get both, and say the same.
std::string difference(ProcessGroup& group, const Entry& entry, int usual, int odd) {
  const Tensor mine = readable(entry.contents);
  const auto size = static_cast<std::int64_t>(bytes_of(mine).size());
  std::vector<Tensor> both;
  for (const int root : {usual, odd}) {
    Tensor bytes = empty({size}, {.dtype = uint8});
    std::memcpy(bytes.data<std::uint8_t>(), mine.raw().data, static_cast<std::size_t>(size));
    group.broadcast(bytes, root).wait();
    Tensor values = empty(mine.shape(), {.dtype = mine.dtype()});
    std::memcpy(values.raw_for_write().data, bytes.raw().data, static_cast<std::size_t>(size));
    both.push_back(values);
  }
  const std::optional<Difference> found = first_difference(both[0], both[1]);
  if (!found) return fmt::format("{} was changed on rank {} or rank {} meanwhile", entry.name, usual, odd);
  return fmt::format("{} of {} is {} on rank {}, but {} on rank {}", found->place, entry.name, found->first, usual,
                     found->other, odd);
}

bool all_same(const std::vector<std::string>& texts) {
  return std::ranges::all_of(texts, [&](const std::string& text) { return text == texts.front(); });
}

// The first that is what most are, and the first that is something else.
std::pair<std::size_t, std::size_t> odd_one_out(const std::vector<std::string>& of_ranks) {
  const auto shared_by = [&](const std::string& text) { return std::ranges::count(of_ranks, text); };
  const auto usual = std::ranges::max_element(of_ranks, {}, shared_by);
  const auto odd = std::ranges::find_if(of_ranks, [&](const std::string& text) { return text != *usual; });
  return {static_cast<std::size_t>(usual - of_ranks.begin()), static_cast<std::size_t>(odd - of_ranks.begin())};
}

// CommError on every rank unless all but those that have `ended` have the same entries. `when` is said after "the ranks
// differ".
void compare(ProcessGroup& group, const std::vector<Entry>& entries, const char* advice, const std::string& when = "",
             const std::vector<int>& ended = {}) {
  if (group.size() == 1) return;
  const NoGradGuard no_grad;
  std::string text;
  for (const std::string& line : lines_of(entries)) text += line + '\n';
  const std::vector<std::int64_t> digests =
      gather_numbers(group, static_cast<std::int64_t>(hash(std::as_bytes(std::span(text)))));
  std::vector<std::size_t> ranks;  // that are compared
  for (std::size_t r = 0; r < digests.size(); ++r)
    if (std::ranges::find(ended, static_cast<int>(r)) == ended.end()) ranks.push_back(r);
  if (std::ranges::all_of(ranks, [&](std::size_t r) { return digests[r] == digests[ranks.front()]; })) return;
  std::vector<std::vector<std::string>> lines;  // by rank
  for (const std::string& theirs : gather_texts(group, text)) lines.push_back(split(theirs, '\n'));
  const auto of_ranks = [&](std::size_t at) {
    std::vector<std::string> found;
    for (const std::size_t r : ranks) found.push_back(at < lines[r].size() ? lines[r][at] : "nothing more");
    return found;
  };
  std::size_t at = 0;
  while (all_same(of_ranks(at))) ++at;
  std::vector<std::string> looks = of_ranks(at);
  for (std::string& look : looks) look = look.substr(0, look.find('\t'));
  const bool alike = all_same(looks);
  const auto [i, j] = odd_one_out(alike ? of_ranks(at) : looks);
  const int usual = static_cast<int>(ranks[i]), odd = static_cast<int>(ranks[j]);
  std::string what = fmt::format("rank {} has {}, where rank {} has {}", usual, looks[i], odd, looks[j]);
  if (alike && std::ranges::all_of(lines, [&](const auto& theirs) { return at < theirs.size(); }))
    what = difference(group, entries[at], usual, odd);
  else if (alike)  // an ended rank has no such entry, by which it could take part in showing the values
    what = fmt::format("the values of {} on rank {} are not those on rank {}", looks[i], usual, odd);
  throw CommError(
      odd, fmt::format("rank {} of {}: the ranks differ{}: {}; {}", group.rank(), group.size(), when, what, advice));
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
constexpr const char* kDiverged =
    "they were alike before, so that one has computed or written something else: look for writes to weights on some "
    "ranks alone, steps that not all take, and broken memory; go on from a checkpoint";

}  // namespace

void verify_structure(const nn::Module& model, ProcessGroup& group,
                      const std::vector<std::pair<std::string, std::string>>& options) {
  std::vector<Entry> entries;
  for (const auto& [name, value] : options) entries.push_back({fmt::format("option {}", name), value});
  for (Entry& entry : entries_of(model, false, true)) entries.push_back(std::move(entry));
  compare(group, entries, kSameModel);
}

void verify_alike(const std::vector<std::pair<std::string, std::string>>& values, ProcessGroup& group,
                  const char* advice, const std::vector<int>& ended) {
  std::vector<Entry> entries;
  for (const auto& [name, value] : values) entries.push_back({name, value});
  compare(group, entries, advice, "", ended);
}

void check_consistency(const nn::Module& model, const optim::Optimizer& optimizer,
                       const std::shared_ptr<ProcessGroup>& group) {
  const Purpose purpose("check_consistency");
  std::vector<Entry> entries = entries_of(model, true, true);
  add(entries, "optimizer state", optimizer.state_dict(), true);
  compare(*or_default(group), entries, kSameState);
}

void check_consistency(const nn::Module& model, const std::shared_ptr<ProcessGroup>& group) {
  const Purpose purpose("check_consistency");
  compare(*or_default(group), entries_of(model, true, true), kSameState);
}

void check_before_first_step(const nn::Module& model, const Stateful* optimizer, ProcessGroup& group,
                             const std::vector<int>& ended) {
  std::vector<Entry> entries = entries_of(model, true, false);
  if (optimizer != nullptr) add(entries, "optimizer state", optimizer->state_dict(), true);
  compare(group, entries, kSameState, "", ended);
}

void check_divergence(const nn::Module& model, ProcessGroup& group, std::int64_t step, const std::vector<int>& ended) {
  compare(group, entries_of(model, true, false), kDiverged, fmt::format(" at step {}", step), ended);
}

void broadcast_tensors(const std::vector<Tensor>& tensors, int root, ProcessGroup& group) {
  if (group.size() == 1) return;
  const NoGradGuard no_grad;
  constexpr std::int64_t kPiece = 16 << 20;
  std::vector<BucketItem> items;  // without devices, which the ranks choose for themselves
  for (const Tensor& t : tensors) items.push_back({.bytes = t.nbytes(), .dtype = t.dtype()});
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
      if (t.device().is_cuda() || !same_bits(t, parts[k])) t.copy_(parts[k]);  // the host does not wait for a GPU
    }
  }
}

void broadcast_state(Stateful& state, const std::shared_ptr<ProcessGroup>& given, int from) {
  const Purpose purpose("broadcast_state");
  const NoGradGuard no_grad;
  check(dynamic_cast<const ZeroRedundancyOptimizer*>(&state) == nullptr, "broadcast_state",
        "the state of a ZeroRedundancyOptimizer is divided among the ranks; load the file on every rank");
  const std::shared_ptr<ProcessGroup> group = or_default(given);
  check(from >= 0 && from < group->size(), "broadcast_state", "root {} is out of range: the group has ranks 0 to {}",
        from, group->size() - 1);
  const bool root = group->rank() == from;
  NamedTensors entries = root ? state.state_dict() : NamedTensors();
  for (auto& entry : entries) entry.second = readable(entry.second);  // the others make theirs on the CPU, too
  // The root says what there is: for each entry its name, type and sizes.
  std::string text;
  for (const auto& [name, t] : entries)
    text += fmt::format("{}\t{}\t{}\n", name, static_cast<int>(t.dtype()), fmt::join(t.shape(), " "));
  text = gather_texts(*group, text)[static_cast<std::size_t>(from)];
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
  broadcast_tensors(tensors, from, *group);
  std::string problems;
  if (!root) problems = fmt::format("{}", fmt::join(state.state_problems(entries), "; "));
  const std::vector<std::string> all = gather_texts(*group, problems);
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].empty())
      throw CommError(static_cast<int>(r),
                      fmt::format("rank {} of {}: rank {} cannot take over rank {}'s {}: {}", group->rank(),
                                  group->size(), r, from, state.state_name(), all[r]));
  if (!root) state.load_state_dict(entries);
}

}  // namespace tandem::parallel
