// What a collective is: the request that ProcessGroup hands to a backend, and the fingerprint by which ranks find out,
// before data moves, that they do not mean the same.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <tandem/tensor/tensor.h>

namespace tandem::parallel {

/// Of the message of fail; longer ones are cut.
inline constexpr std::size_t kMaxMessageBytes = 1023;

/// How the values of the ranks are combined.
enum class ReduceOp : std::int32_t { sum, product, min, max, avg };

enum class Operation : std::int32_t {
  all_reduce,
  broadcast,
  reduce,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  send,
  recv,
  barrier,
  fail,  // this rank cannot take part in whatever the others call, and says why
};

/// What a rank says of itself when it makes a collective that belongs to a join.
enum class JoinStage : std::int32_t { none, starts, goes_on, ended, stops };

struct Fingerprint;

/// What the collectives belong to that this thread starts meanwhile: "save_checkpoint". Errors say so, and those of two
/// different purposes do not meet. Of several, one inside the other, the first counts. The text outlives it, and is cut
/// at kMaxBytes.
class Purpose {
 public:
  static constexpr std::size_t kMaxBytes = 63;
  explicit Purpose(std::string_view what);
  ~Purpose();
  Purpose(const Purpose&) = delete;
  Purpose& operator=(const Purpose&) = delete;
  static std::string_view current();

 private:
  const std::string_view before_;
};

/// One rank's part of a collective. Tensors are detached. Where an operation works in place, input and output are the
/// same tensor; where this rank reads or gets nothing, they are undefined.
///   all_reduce      input = output = t
///   broadcast       input on the root, output on the others
///   reduce          input everywhere, output on the root
///   all_gather      output has size() times the elements of input, those of rank 0 first
///   gather          the same, output on the root alone
///   scatter         input on the root has size() times the elements of output
///   reduce_scatter  input has size() times the elements of output
///   all_to_all      input and output have size() parts, part r for and from rank r
///   send, recv      input, and output; `root` is the other rank
struct Collective {
  Operation operation = Operation::barrier;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  Tensor input = {}, output = {};
  std::string message = {};  // of fail
  std::string purpose = {};  // see Purpose
  Tensor view = {};          // what the output was before make_dense, when it was not dense
  JoinStage stage = JoinStage::none;
  std::shared_ptr<const Fingerprint> announced = nullptr;  // of a call whose data go another way: only compared

  // The backend calls these on any thread, before and after it moves the data.

  /// Puts dense copies in the place of tensors that are not dense. Not before earlier calls have ended, whose results
  /// the copies must have.
  void make_dense();
  /// When the call went well: takes the result to the view that the output stands for, and counts it as a change.
  void finish();
};

/// What one rank says about a collective.
struct Fingerprint {
  static constexpr int kMaxDims = 8;
  std::uint64_t sequence =
      0;  // counts the group's collectives; for send and recv, the messages from the one to the other
  std::int32_t operation = 0, dtype = 0, root = 0, op = 0;
  std::int64_t count = 0;   // elements of each rank's share, the smaller of input and output; of all_to_all, all parts
  std::int32_t dims = 0;    // and the shape of it, where it has at most kMaxDims dimensions
  std::int32_t stage = 0;   // of a join, for errors: ranks in different stages agree
  std::int32_t on_gpu = 0;  // the data go from GPU to GPU, and not the way that the fingerprint goes
  std::array<std::int64_t, kMaxDims> shape = {};
  std::array<char, Purpose::kMaxBytes + 1> purpose = {};  // ends with 0
  bool of_join() const { return stage != 0; }
  std::string_view why() const { return {purpose.data(), std::find(purpose.begin(), purpose.end() - 1, '\0')}; }
  friend bool operator==(const Fingerprint& a, const Fingerprint& b);
};
Fingerprint fingerprint(const Collective& collective, std::uint64_t sequence);
/// "all_reduce (sum, call 7) of {10, 10} float32", and what it is part of.
std::string describe(const Fingerprint& f);
/// The name of an operation, as in the public functions.
const char* name(Operation operation);
/// Whether it is between two ranks alone.
constexpr bool is_message(Operation o) { return o == Operation::send || o == Operation::recv; }
/// Whether it combines values by a ReduceOp.
constexpr bool combines(Operation o) {
  return o == Operation::all_reduce || o == Operation::reduce || o == Operation::reduce_scatter;
}

}  // namespace tandem::parallel
