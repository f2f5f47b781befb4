// DistributedDataParallel over threads of this process; distributed_program runs the same over processes.
#include <tandem/tests/parallel/ddp_cases.h>
#include <tandem/tests/parallel/local_group.h>
#include <tandem/tests/support/test.h>

using namespace tandem;

TEST_CASE("DistributedDataParallel does what it must on 1 to 4 ranks") {
  for (const auto& cases : {test::equality_cases(), test::gradient_cases(), test::loss_cases(), test::mechanism_cases(),
                            test::failure_cases(), test::consistency_cases()})
    for (const test::DdpCase& c : cases)
      for (int ranks = 1; ranks <= 4; ++ranks) {
        INFO(std::string(c.name));
        CAPTURE(ranks);
        CHECK(test::error_of([&] { test::run_ranks(ranks, [&](const test::Group& group) { c.run(group); }); }) ==
              "no error");
      }
}
