// What the command line cannot make different: the program's version and the ranks of a node.
#include "core/error.h"
#include "support.h"
#include "train/agreement.h"

namespace minillm::testing {
namespace {

constexpr const char* kProgram = "minillm 1.0";

std::string list_of_ranks_from(int first) {
  const int last = world->size() - 1;
  if (first == last) return "rank " + std::to_string(first);
  return "ranks " + std::to_string(first) + (last == first + 1 ? ", " : "–") + std::to_string(last);
}

/// Runs on all ranks; on all of them the same error names `part`.
template <class Work>
void expect_disagreement(const std::string& part, Work work) {
  std::string message;
  try {
    work();
  } catch (const CommunicationError& error) {
    message = error.what();
  }
  EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(comm::broadcast(*world, message), message);
}

/// The same ranks on machines of other sizes.
class OtherMachines final : public comm::Bootstrap {
 public:
  explicit OtherMachines(int local_size) : local_size_(local_size) {}
  int rank() const override { return world->rank(); }
  int size() const override { return world->size(); }
  int local_rank() const override { return 0; }
  int local_size() const override { return local_size_; }
  void barrier() override { world->barrier(); }
  void broadcast(std::span<std::byte> bytes) override { world->broadcast(bytes); }
  void gather(const comm::Group& group, std::span<const std::byte> part, std::span<std::byte> all) override {
    world->gather(group, part, all);
  }
  int64_t max(int64_t value) override { return world->max(value); }
  [[noreturn]] void abort(int exit_code) override {
    world->abort(exit_code);
    std::terminate();
  }

 private:
  int local_size_;
};

TEST(Agreement, RanksThatAreAlikeGoOn) {
  EXPECT_NO_THROW(train::require_agreement(tiny_config(), kProgram, *world));
  EXPECT_NO_THROW(train::require_same_choice(tiny_config(), "NVIDIA H100 SXM", *world));
}

TEST(Agreement, OtherVersions) {
  if (world->size() == 1) GTEST_SKIP() << "one rank";
  const std::string program = world->rank() == 0 ? "minillm 0.9" : kProgram;
  expect_disagreement(
      "the program is minillm 0.9 on rank 0 and minillm 1.0 on " + list_of_ranks_from(1) + "\n",
      [&] { train::require_agreement(tiny_config(), program, *world); });
}

TEST(Agreement, NodesOfOtherSizesMatterToGroupsOfANode) {
  if (world->size() == 1) GTEST_SKIP() << "one rank";
  OtherMachines machines(world->rank() == 0 ? 1 : 2);
  config::Config config = tiny_config();
  EXPECT_NO_THROW(train::require_agreement(config, kProgram, machines));
  config.parallel.policy = "hybrid";
  expect_disagreement(
      "parallel.group_size 0, the ranks of a node, is 1 on rank 0 and 2 on " + list_of_ranks_from(1) + "\n",
      [&] { train::require_agreement(config, kProgram, machines); });
  config.parallel.group_size = 1;
  EXPECT_NO_THROW(train::require_agreement(config, kProgram, machines));
}

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
