#include <tandem/parallel/comm/mesh_team.h>

#include <algorithm>
#include <cstring>

#include <tandem/parallel/comm/combine.h>

namespace tandem::parallel {
namespace {

constexpr std::size_t kDirectBytes = 8 << 10;  // up to this size every rank combines everything: one exchange less

char* data_of(const Tensor& t) {
  return t.defined() ? static_cast<char*>(const_cast<void*>(static_cast<const void*>(t.raw().data))) : nullptr;
}

}  // namespace

void exchange_in_pieces(Mesh& mesh, int lane, std::vector<Transfer> sends, std::vector<Transfer> receives,
                        double seconds) {
  const auto take_piece = [](std::vector<Transfer>& whole) {
    std::vector<Transfer> pieces;
    for (Transfer& t : whole) {
      pieces.push_back({t.peer, t.data, std::min(t.bytes, Team::kPieceBytes)});
      t.data = static_cast<char*>(t.data) + pieces.back().bytes;
      t.bytes -= pieces.back().bytes;
    }
    std::erase_if(whole, [](const Transfer& t) { return t.bytes == 0; });
    return pieces;
  };
  while (!sends.empty() || !receives.empty()) {
    const std::vector<Transfer> these = take_piece(sends), those = take_piece(receives);
    mesh.exchange(lane, these, those, seconds);
  }
}

Team::Team(Mesh& mesh, std::vector<int> members, int rank, double seconds)
    : mesh_(mesh), members_(std::move(members)), seconds_(seconds) {
  place_ = static_cast<int>(std::find(members_.begin(), members_.end(), rank) - members_.begin());
}

void Team::exchange(std::vector<Transfer> sends, std::vector<Transfer> receives) {
  for (auto* transfers : {&sends, &receives})
    for (Transfer& t : *transfers) t.peer = members_[static_cast<std::size_t>(t.peer)];
  exchange_in_pieces(mesh_, kLane, std::move(sends), std::move(receives), seconds_);
}

void Team::run(const Collective& c) {
  const std::int64_t count = fingerprint(c, 0).count;
  const Tensor& any = c.input.defined() ? c.input : c.output;
  if (!any.defined() || count == 0) return;
  // Of what goes from one rank to another.
  const bool in_parts = c.operation == Operation::all_to_all;
  const std::size_t bytes = static_cast<std::size_t>(in_parts ? count / size() : count) * size_of(any.dtype());
  char *const in = data_of(c.input), *const out = data_of(c.output);
  const auto part = [&](char* whole, int r) { return whole + static_cast<std::size_t>(r) * bytes; };
  std::vector<Transfer> sends, receives;
  // To or from each other rank.
  const auto to_all = [&](const auto& data) {
    for (int r = 0; r < size(); ++r)
      if (r != place_) sends.push_back({r, data(r), bytes});
  };
  const auto from_all = [&](const auto& data) {
    for (int r = 0; r < size(); ++r)
      if (r != place_) receives.push_back({r, data(r), bytes});
  };
  const bool is_root = place_ == c.root;
  switch (c.operation) {
    case Operation::all_reduce:
    case Operation::reduce:
      return reduce_all(c, count);
    case Operation::reduce_scatter:
      return reduce_parts(c, count);
    case Operation::broadcast:
      if (is_root)
        to_all([&](int) { return in; });
      else
        receives.push_back({c.root, out, bytes});
      break;
    case Operation::all_gather:
      std::memmove(part(out, place_), in, bytes);
      to_all([&](int) { return part(out, place_); });
      from_all([&](int r) { return part(out, r); });
      break;
    case Operation::gather:
      if (is_root) {
        std::memmove(part(out, place_), in, bytes);
        from_all([&](int r) { return part(out, r); });
      } else {
        sends.push_back({c.root, in, bytes});
      }
      break;
    case Operation::scatter:
      if (is_root)
        to_all([&](int r) { return part(in, r); });
      else
        receives.push_back({c.root, out, bytes});
      break;
    case Operation::all_to_all:
      std::memcpy(part(out, place_), part(in, place_), bytes);
      to_all([&](int r) { return part(in, r); });
      from_all([&](int r) { return part(out, r); });
      break;
    case Operation::send:
    case Operation::recv:
    case Operation::barrier:
    case Operation::fail:
      return;
  }
  exchange(std::move(sends), std::move(receives));
  if (c.operation == Operation::scatter && is_root) std::memmove(out, part(in, place_), bytes);
}

// Sends the elements ranges[r] of the input to each other rank r, and combines all ranks' elements of this rank's
// range.
void Team::combine_mine(const Collective& c, const std::vector<Range>& ranges, char* result) {
  const DType dtype = c.input.dtype();
  const std::size_t width = size_of(dtype);
  const Range mine = ranges[static_cast<std::size_t>(place_)];
  const std::size_t bytes = static_cast<std::size_t>(mine.count) * width;
  scratch_.resize(std::max(scratch_.size(), bytes * static_cast<std::size_t>(size() - 1)));
  std::vector<Transfer> sends, receives;
  std::vector<const void*> parts;
  char* next = scratch_.data();
  for (int r = 0; r < size(); ++r) {
    const Range theirs = ranges[static_cast<std::size_t>(r)];
    char* data = data_of(c.input) + static_cast<std::size_t>(theirs.first) * width;
    if (r == place_) {
      parts.push_back(data);
      continue;
    }
    sends.push_back({r, data, static_cast<std::size_t>(theirs.count) * width});
    receives.push_back({r, next, bytes});
    parts.push_back(next);
    next += bytes;
  }
  exchange(std::move(sends), std::move(receives));
  combine(dtype, c.op, parts, std::vector<void*>{result}, mine.count);
}

// all_reduce, and reduce, which leaves all tensors but the root's as they are.
void Team::reduce_all(const Collective& c, std::int64_t count) {
  const std::size_t width = size_of(c.input.dtype());
  char* const in = data_of(c.input);
  const bool everywhere = c.operation == Operation::all_reduce;
  if (static_cast<std::size_t>(count) * width <= kDirectBytes && everywhere)
    return combine_mine(c, std::vector<Range>(static_cast<std::size_t>(size()), {0, count}), data_of(c.output));
  const auto piece = static_cast<std::int64_t>(kPieceBytes / width);
  std::vector<char> aside;  // the result, where it must not go into the tensor
  for (std::int64_t first = 0; first < count; first += piece) {
    const std::int64_t n = std::min(piece, count - first);
    std::vector<Range> ranges;
    for (int r = 0; r < size(); ++r) {
      const std::int64_t begin = n * r / size(), end = n * (r + 1) / size();
      ranges.push_back({first + begin, end - begin});
    }
    const auto bytes = [&](int r) {
      return static_cast<std::size_t>(ranges[static_cast<std::size_t>(r)].count) * width;
    };
    const auto chunk = [&](int r) {
      return in + static_cast<std::size_t>(ranges[static_cast<std::size_t>(r)].first) * width;
    };
    char* result = chunk(place_);
    if (!everywhere && place_ != c.root) {
      aside.resize(bytes(place_));
      result = aside.data();
    }
    combine_mine(c, ranges, result);
    std::vector<Transfer> sends, receives;
    for (int r = 0; r < size(); ++r) {
      if (r == place_) continue;
      if (everywhere || r == c.root) sends.push_back({r, result, bytes(place_)});
      if (everywhere || place_ == c.root) receives.push_back({r, chunk(r), bytes(r)});
    }
    exchange(std::move(sends), std::move(receives));
  }
}

void Team::reduce_parts(const Collective& c, std::int64_t count) {
  const std::size_t width = size_of(c.input.dtype());
  const std::int64_t piece = std::max<std::int64_t>(1, static_cast<std::int64_t>(kPieceBytes / width) / size());
  for (std::int64_t first = 0; first < count; first += piece) {
    const std::int64_t n = std::min(piece, count - first);
    std::vector<Range> ranges;
    for (int r = 0; r < size(); ++r) ranges.push_back({count * r + first, n});
    combine_mine(c, ranges, data_of(c.output) + static_cast<std::size_t>(first) * width);
  }
}

}  // namespace tandem::parallel
