// Ranks bound to one core: counting cores, and what the user is told.
#include "comm/affinity.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "tests/unit/temporary_folder.h"

namespace minillm::comm {
namespace {

TEST(Affinity, ProcessorsOfACoreCountOnce) {
  const test::TemporaryFolder folder;
  // As Linux tells of two cores with two threads each; nothing is known of processor 4.
  for (int processor = 0; processor < 4; ++processor) {
    const std::string name = "cpu" + std::to_string(processor) + "/topology";
    std::filesystem::create_directories(folder.path(name));
    (void)folder.write(name + "/thread_siblings_list", processor % 2 == 0 ? "0,2\n" : "1,3\n");
  }
  const auto cores = [&](std::vector<int> processors) { return count_cores(processors, folder.path("")); };
  EXPECT_EQ(cores({0}), 1);
  EXPECT_EQ(cores({0, 2}), 1);
  EXPECT_EQ(cores({0, 1}), 2);
  EXPECT_EQ(cores({0, 1, 2, 3}), 2);
  EXPECT_EQ(cores({0, 2, 4}), 2);
  EXPECT_EQ(cores({}), 0);
}

TEST(Affinity, OneCoreOfMoreIsWarnedOf) {
  EXPECT_EQ(affinity_warning(std::vector<Cores>{{8, 8}, {2, 8}}), "");
  EXPECT_EQ(affinity_warning(std::vector<Cores>{{1, 1}, {1, 1}}), "") << "there is no other";
  EXPECT_EQ(
      affinity_warning(std::vector<Cores>{{8, 8}, {1, 8}}),
      "warning: rank 1 is bound to one core of 8, on which threads have to take turns: start with mpirun "
      "--bind-to none, srun --cpu-bind=none");
  EXPECT_EQ(
      affinity_warning(std::vector<Cores>{{1, 64}, {1, 64}, {2, 64}}),
      "warning: 2 of 3 ranks, the first is 0, are each bound to one core of 64, on which threads have to "
      "take turns: start with mpirun --bind-to none, srun --cpu-bind=none");
}

}  // namespace
}  // namespace minillm::comm
