#include <tandem/parallel/comm/shm_transfer.h>

#include <algorithm>
#include <cstring>

#include <tandem/parallel/comm/combine.h>

namespace tandem::parallel {
namespace {

constexpr std::int64_t kLineBytes = 64;

// Inputs of these operations have a part for each rank.
bool has_parts(Operation o) {
  return o == Operation::scatter || o == Operation::reduce_scatter || o == Operation::all_to_all;
}

// Elements of one part.
std::int64_t part_count(const Fingerprint& call, int size) {
  return static_cast<Operation>(call.operation) == Operation::all_to_all ? call.count / size : call.count;
}

}  // namespace

bool gives_input(const Fingerprint& call, int rank) {
  if (call.on_gpu != 0) return false;
  switch (static_cast<Operation>(call.operation)) {
    case Operation::barrier:
    case Operation::fail:
      return false;
    case Operation::broadcast:
    case Operation::scatter:
      return rank == call.root;
    default:
      return true;
  }
}

std::size_t input_bytes(const Fingerprint& call, int size) {
  const std::int64_t parts = has_parts(static_cast<Operation>(call.operation)) ? size : 1;
  return static_cast<std::size_t>(part_count(call, size) * parts) * size_of(static_cast<DType>(call.dtype));
}

StepTransfer::StepTransfer(const SharedMemory& memory, const Collective& collective,
                           const std::vector<const Post*>& posts, int rank)
    : memory_(memory),
      operation_(collective.operation),
      op_(collective.op),
      root_(collective.root),
      rank_(rank),
      size_(static_cast<int>(posts.size())),
      parts_(has_parts(operation_) ? size_ : 1) {
  const Post& mine = *posts[static_cast<std::size_t>(rank)];
  dtype_ = static_cast<DType>(mine.call.dtype);
  item_ = static_cast<std::int64_t>(size_of(dtype_));
  count_ = piece_count_ = part_count(mine.call, size_);
  with_post_ = mine.input.area == Location::kWithPost;
  if (collective.input.defined()) input_ = static_cast<const char*>(collective.input.raw().data);
  if (collective.output.defined()) output_ = static_cast<char*>(collective.output.raw().data);
  if (size_ == 1) inputs_.push_back(const_cast<char*>(input_));  // nobody else needs to reach it
  for (int r = 0; r < size_ && size_ > 1; ++r) {
    const Post& post = *posts[static_cast<std::size_t>(r)];
    if (gives_input(post.call, r) && post.input.area == Location::kNowhere) {
      inputs_.clear();
      piece_count_ = static_cast<std::int64_t>(ProcessMemory::kPieceBytes) / (item_ * parts_);
      if (piece_count_ > kLineBytes) piece_count_ -= piece_count_ % kLineBytes;
      steps_ = static_cast<int>((count_ + piece_count_ - 1) / piece_count_) + 1;
      return;
    }
    inputs_.push_back(gives_input(post.call, r) ? memory.address(r, post.input) : nullptr);
  }
}

std::int64_t StepTransfer::count_of(int piece) const { return std::min(piece_count_, count_ - first_of(piece)); }

char* StepTransfer::input_of(int rank, int part, int piece) const {
  if (!inputs_.empty()) return inputs_[static_cast<std::size_t>(rank)] + part * count_ * item_;
  return memory_.piece(rank, static_cast<std::size_t>(piece) % 2) + part * count_of(piece) * item_;
}

// Step 0 copies the first piece in; step i + 1 works on piece i. A piece's room is free for the next but one when this
// rank has copied the result out, since the others have done their share of it a step before.
void StepTransfer::run(int i) {
  if (count_ == 0) return;
  if (!inputs_.empty()) return share(0);
  if (i == 0) return copy_in(0);
  if (i >= 2) copy_out(i - 2);
  share(i - 1);
  if (i + 1 < steps_) copy_in(i);
}

void StepTransfer::finish() {
  if (count_ == 0) return;
  if (inputs_.empty())
    copy_out(steps_ - 2);
  else if (with_post_)
    copy_out(0);
}

void StepTransfer::copy_in(int piece) {
  const Fingerprint call{.operation = static_cast<std::int32_t>(operation_), .root = root_};
  if (!gives_input(call, rank_)) return;
  for (int part = 0; part < parts_; ++part)
    std::memcpy(input_of(rank_, part, piece), input_ + (part * count_ + first_of(piece)) * item_,
                static_cast<std::size_t>(count_of(piece) * item_));
}

// Of the operations whose result is where the input was.
void StepTransfer::copy_out(int piece) {
  if (operation_ != Operation::all_reduce && (operation_ != Operation::reduce || rank_ != root_)) return;
  std::memcpy(output_ + first_of(piece) * item_, input_of(rank_, 0, piece),
              static_cast<std::size_t>(count_of(piece) * item_));
}

void StepTransfer::share(int piece) {
  switch (operation_) {
    case Operation::all_reduce:
      return combine_slice(piece, false);
    case Operation::reduce:
      return combine_slice(piece, true);
    case Operation::broadcast:
      if (rank_ != root_) take(root_, 0, piece, 0);
      return;
    case Operation::scatter:
      return take(root_, rank_, piece, 0);
    case Operation::gather:
      if (rank_ != root_) return;
      [[fallthrough]];
    case Operation::all_gather:
      for (int r = 0; r < size_; ++r) take(r, 0, piece, r * count_);
      return;
    case Operation::all_to_all:
      for (int r = 0; r < size_; ++r) take(r, rank_, piece, r * count_);
      return;
    case Operation::reduce_scatter: {
      std::vector<const void*> parts;
      for (int r = 0; r < size_; ++r) parts.push_back(input_of(r, rank_, piece));
      void* const output = output_ + first_of(piece) * item_;
      return combine(dtype_, op_, parts, {&output, 1}, count_of(piece));
    }
    case Operation::send:
    case Operation::recv:
    case Operation::barrier:
    case Operation::fail:
      return;
  }
}

// Each rank combines a slice of whole cache lines, and writes it to all, or to the root: whoever wrote a line can write
// it again at little cost.
void StepTransfer::combine_slice(int piece, bool to_root) {
  if (size_ == 1) return;  // the only input is the result
  const std::int64_t line = kLineBytes / item_, lines = (count_of(piece) + line - 1) / line;
  const std::int64_t first = lines * rank_ / size_ * line;
  const std::int64_t last = std::min(lines * (rank_ + 1) / size_ * line, count_of(piece));
  if (first >= last) return;
  std::vector<const void*> parts;
  std::vector<void*> outputs;
  for (int r = 0; r < size_; ++r) {
    char* at = input_of(r, 0, piece) + first * item_;
    parts.push_back(at);
    if (!to_root || r == root_) outputs.push_back(at);
  }
  combine(dtype_, op_, parts, outputs, last - first);
}

// Copies a part of a rank's input to the output, behind `to` elements.
void StepTransfer::take(int from, int part, int piece, std::int64_t to) {
  char* target = output_ + (to + first_of(piece)) * item_;
  const char* source = input_of(from, part, piece);
  if (target != source) std::memcpy(target, source, static_cast<std::size_t>(count_of(piece) * item_));
}

}  // namespace tandem::parallel
