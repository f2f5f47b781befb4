// The cases of all_to_all, send and recv, and of waiting for a limited time.
#include <algorithm>
#include <vector>

#include <tandem/autograd/functions.h>
#include <tandem/tensor/create.h>
#include <tandem/tests/parallel/collective_cases.h>

namespace tandem::test {

using parallel::ProcessGroup;
using parallel::Work;

namespace {

// Message `i` from a rank, of any size.
Tensor message_of(int rank, std::int64_t count, DType dtype, int i) { return values_of(rank, count, dtype, i); }

void all_to_all_case(ProcessGroup& group, DType dtype, std::int64_t count, int salt) {
  const int n = group.size(), me = group.rank();
  const Tensor mine = values_of(me, n * count, dtype, salt).view({n, count}), before = mine.clone();
  Tensor output = empty({n, count}, {.dtype = dtype});
  group.all_to_all(output, mine).wait();
  for (int r = 0; r < n; ++r)
    require(same_bits(output[r], values_of(r, n * count, dtype, salt).view({n, count})[me]), "all_to_all");
  require(same_bits(mine, before), "the input of all_to_all stays");
  // Views on both sides; the parts are those of the elements in their order.
  Tensor wide = zeros({count, n, 2}, {.dtype = dtype}), target = zeros({count, n, 2}, {.dtype = dtype});
  wide.select(2, 1).copy_(mine.view({count, n}));
  Tensor view = target.select(2, 0);
  group.all_to_all(view, wide.select(2, 1)).wait();
  require(
      same_bits(view, output.view({count, n})) && same_bits(target.select(2, 1), zeros({count, n}, {.dtype = dtype})),
      "all_to_all of views");
}

// Every rank sends to the next one.
void ring_case(ProcessGroup& group, DType dtype, std::int64_t count, int salt) {
  const int n = group.size(), me = group.rank(), next = (me + 1) % n, before = (me + n - 1) % n;
  const Tensor mine = message_of(me, count, dtype, salt);
  Tensor theirs = zeros({count}, {.dtype = dtype});
  const auto version = theirs.version();
  const Work sent = group.send(mine, next);
  group.recv(theirs, before).wait();
  sent.wait();
  require(same_bits(theirs, message_of(before, count, dtype, salt)), "a message in the ring");
  require(same_bits(mine, message_of(me, count, dtype, salt)), "what is sent stays");
  require(theirs.version() != version, "what is received counts as a change");
}

// Every rank sends several to every other one, and they are received in the order of their sends, whatever the order of
// waiting.
void crossing_cases(ProcessGroup& group, std::int64_t largest) {
  constexpr int kMessages = 12;
  const int n = group.size(), me = group.rank();
  const auto size_of_message = [&](int i) { return i == 7 ? largest : i % 3 == 0 ? 3000 + i : i; };
  for (const bool receive_first : {false, true}) {
    std::vector<std::vector<Tensor>> received(static_cast<std::size_t>(n));
    std::vector<Work> works;
    const auto send = [&](int peer, int i) {
      Work work = group.send(message_of(me, size_of_message(i), float32, i + peer), peer);
      if (i % 5 != 0) works.push_back(std::move(work));  // some works are dropped
    };
    const auto receive = [&](int peer, int i) {
      auto& theirs = received[static_cast<std::size_t>(peer)];
      theirs.push_back(zeros({size_of_message(i)}));
      works.push_back(group.recv(theirs.back(), peer));
    };
    for (int i = 0; i < kMessages; ++i)
      for (int peer = 0; peer < n; ++peer) {
        if (peer == me) continue;
        if (receive_first) receive(peer, i);
        send(peer, i);
        if (!receive_first) receive(peer, i);
      }
    if (me % 2 == 0) std::reverse(works.begin(), works.end());
    for (const Work& w : works) w.wait();
    for (int peer = 0; peer < n; ++peer)
      for (int i = 0; i < kMessages && peer != me; ++i)
        require(same_bits(received[static_cast<std::size_t>(peer)][static_cast<std::size_t>(i)],
                          message_of(peer, size_of_message(i), float32, i + me)),
                fmt::format("message {} from rank {}", i, peer));
  }
}

void views_case(ProcessGroup& group) {
  const int n = group.size(), me = group.rank(), next = (me + 1) % n, before = (me + n - 1) % n;
  Tensor whole = zeros({4, 3, 2}), source = zeros({5, 4});
  source.fill_(me + 1.0);
  Tensor target = whole.select(2, 1);
  const Work sent = group.send(source.narrow(0, 1, 3).t(), next);
  group.recv(target, before).wait();
  sent.wait();
  require(same_bits(target, full({4, 3}, before + 1.0)) && same_bits(whole.select(2, 0), zeros({4, 3})),
          "a message into a view");
  // Memory of the group is memory like any other.
  Tensor shared = group.allocate({2, 5000}, float32);
  shared[0].fill_(me + 1.0);
  const Work from_shared = group.send(shared[0], next);
  Tensor row = shared[1];
  group.recv(row, before).wait();
  from_shared.wait();
  require(same_bits(shared[1], full({5000}, before + 1.0)), "a message in allocated memory");
}

// Messages and collectives do not wait for each other.
void mixed_cases(ProcessGroup& group, std::int64_t largest) {
  const int n = group.size(), me = group.rank(), last = n - 1;
  Tensor sum = full({5000}, me + 1.0), message = zeros({largest});
  const Tensor expected = full({5000}, n * (n + 1) / 2.0);
  // A recv is under way, and collectives are waited for.
  Work received;
  if (me == 0) received = group.recv(message, last);
  group.all_reduce(sum).wait();
  require(same_bits(sum, expected), "a collective while a recv waits");
  if (me == last) group.send(message_of(last, largest, float32, 3), 0).wait();
  received.wait();
  require(me != 0 || same_bits(message, message_of(last, largest, float32, 3)), "a recv that waited");
  // A collective is under way, and messages are waited for; the send is dropped.
  sum.fill_(me + 1.0);
  Work reduced;
  if (me != 0) reduced = group.all_reduce(sum);
  if (me == 0) (void)group.send(message_of(0, largest, float32, 4), last);
  if (me == last) group.recv(message, 0).wait();
  if (me == 0) reduced = group.all_reduce(sum);
  reduced.wait();
  require(same_bits(sum, expected), "a collective that waited");
  require(me != last || same_bits(message, message_of(0, largest, float32, 4)), "a recv while a collective waits");
  group.barrier().wait();
}

// Ranks 0 and 1 do not mean the same: an error on both, and later messages arrive.
void difference_cases(ProcessGroup& group) {
  const int n = group.size(), me = group.rank();
  if (me < 2) {
    const Tensor four = full({4}, 7.0);
    struct Difference {
      Tensor tensor;
      const char* text;
    };
    for (auto& [other, text] : std::vector<Difference>{{zeros({5}), "of {5} float32"},
                                                       {zeros({2, 2}), "of {2, 2} float32"},
                                                       {zeros({4}, {.dtype = float64}), "of {4} float64"},
                                                       {zeros({100'000}), "of {100000} float32"}}) {
      const Tensor before = other.clone();
      const Work work = me == 0 ? group.send(four, 1) : group.recv(other, 0);
      std::string what = "no error";
      try {
        work.wait();
      } catch (const parallel::CommError& e) {
        what = e.what();
        require(e.rank() == 1 - me, "the rank of the error");
      }
      const char* const mine = me == 0 ? "send (to 1, call" : "recv (from 0, call";
      const char* const theirs = me == 1 ? "send (to 1, call" : "recv (from 0, call";
      for (const std::string& part :
           {fmt::format("rank {} of {}: the ranks disagree: rank {} calls {}", me, n, me, mine),
            fmt::format("rank {} calls {}", 1 - me, theirs), std::string("of {4} float32"), std::string(text)})
        require(what.find(part) != std::string::npos, fmt::format("'{}' is missing in: {}", part, what));
      require(work.is_completed() && work.exception() != nullptr, "the error of a message stays");
      require(same_bits(other, before), "no data move when ranks disagree");
    }
    Tensor after = zeros({4});
    (me == 0 ? group.send(four, 1) : group.recv(after, 0)).wait();
    require(me == 0 || same_bits(after, four), "a message after errors");
  }
  group.barrier().wait();
}

// Waiting for a limited time, for a message and for a collective.
void limited_waits(ProcessGroup& group) {
  const int me = group.rank();
  constexpr double kShort = 0.02, kLong = 60;
  Tensor word = zeros({1}), sum = ones({3}), answer = full({1}, 5.0);
  if (me == 0) {
    const Work work = group.recv(word, 1);
    require(!work.wait(kShort) && !work.is_completed() && work.exception() == nullptr, "nothing has been sent");
    group.send(answer, 1).wait();
    require(work.wait(kLong) && work.is_completed() && work.exception() == nullptr, "a recv within the time");
    require(word.item<double>() == 9, "what was received");
    group.recv(word, 1).wait();  // rank 1 has waited in vain for the sum
    require(group.all_reduce(sum).wait(kLong), "a collective within the time");
  } else {
    if (me == 1) {
      Tensor asked = zeros({1});
      group.recv(asked, 0).wait();
      require(same_bits(asked, answer), "a word from rank 0");
      require(group.send(full({1}, 9.0), 0).wait(kLong), "a send within the time");
    }
    const Work work = group.all_reduce(sum);
    if (me == 1) {
      require(!work.wait(kShort) && !work.is_completed() && work.exception() == nullptr, "rank 0 has not come");
      group.send(answer, 0).wait();
    }
    require(work.wait(kLong) && work.is_completed(), "a collective within the time");
  }
  require(same_bits(sum, full({3}, 1.0 * group.size())), "sum");
  group.barrier().wait();
}

}  // namespace

void message_cases(ProcessGroup& group, std::int64_t largest) {
  int salt = 0;
  const bool alone = group.size() == 1;
  for (int d = 0; d < kDTypeCount; ++d)
    for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, std::int64_t{5}, std::int64_t{1100}, largest}) {
      if (count == largest && d > 1) continue;  // large ones in two types only
      all_to_all_case(group, static_cast<DType>(d), count, ++salt);
      if (!alone) ring_case(group, static_cast<DType>(d), count, ++salt);
    }
  if (alone) return;
  crossing_cases(group, largest);
  views_case(group);
  mixed_cases(group, largest);
  difference_cases(group);
  limited_waits(group);
}

void messages_in_two_groups(ProcessGroup& first, ProcessGroup& second) {
  const int n = first.size(), me = first.rank(), next = (me + 1) % n, before = (me + n - 1) % n;
  if (n == 1) return;
  constexpr std::int64_t kCount = 100'000;
  std::vector<Tensor> received;
  std::vector<Work> works;
  for (int i = 0; i < 6; ++i)
    for (ProcessGroup* group : {&first, &second}) {
      const int salt = 2 * i + (group == &second);
      works.push_back(group->send(message_of(me, kCount, float32, salt), next));
      received.push_back(zeros({kCount}));
      works.push_back(group->recv(received.back(), before));
    }
  Tensor sum = ones({10});
  const Work reduced = second.all_reduce(sum);
  first.barrier().wait();
  if (me % 2 == 1) std::reverse(works.begin(), works.end());
  for (const Work& w : works) w.wait();
  reduced.wait();
  require(same_bits(sum, full({10}, 1.0 * n)), "a collective between the messages of two groups");
  for (std::size_t i = 0; i < received.size(); ++i)
    require(same_bits(received[i], message_of(before, kCount, float32, static_cast<int>(i))),
            "messages of two groups at once");
}

}  // namespace tandem::test
