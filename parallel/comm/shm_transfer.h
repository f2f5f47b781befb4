// StepTransfer: how the data of one collective move, in steps that all ranks do together.
#pragma once
#include <cstdint>
#include <vector>

#include <tandem/parallel/comm/shm_memory.h>

namespace tandem::parallel {

/// Whether this rank's input is read by others, and its size in bytes.
bool gives_input(const Fingerprint& call, int rank);
std::size_t input_bytes(const Fingerprint& call, int size);

/// One collective's way through the memory. Where all inputs lie where every rank reaches them, each rank does its
/// share on them in one step: it combines its slice of all inputs into all of them, or takes what it needs to its
/// output. Else inputs go through the shared memory piece by piece; while the ranks work on one piece, the next is
/// copied in.
class StepTransfer {
 public:
  /// `posts` are those of all ranks, which agree.
  StepTransfer(const SharedMemory& memory, const Collective& collective, const std::vector<const Post*>& posts,
               int rank);
  int steps() const { return steps_; }
  /// Does step `i`; every rank must have done all steps before it.
  void run(int i);
  /// Takes the result to the output; every rank must have done all steps.
  void finish();

 private:
  std::int64_t first_of(int piece) const { return piece * piece_count_; }
  std::int64_t count_of(int piece) const;
  char* input_of(int rank, int part, int piece) const;
  void copy_in(int piece);
  void copy_out(int piece);
  void share(int piece);
  void combine_slice(int piece, bool to_root);
  void take(int from, int part, int piece, std::int64_t to);

  const SharedMemory& memory_;
  Operation operation_;
  ReduceOp op_;
  DType dtype_;
  int root_, rank_, size_, parts_;
  std::int64_t count_, item_, piece_count_;
  const char* input_ = nullptr;
  char* output_ = nullptr;
  std::vector<char*> inputs_;  // of all ranks; empty when they go piece by piece
  bool with_post_ = false;     // this rank's input was copied when it was posted
  int steps_ = 1;
};

}  // namespace tandem::parallel
