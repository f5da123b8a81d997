// Groups of ranks, and the line that tells which way NCCL moves data.
#include "comm/path.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "comm/group.h"
#include "core/error.h"

namespace minillm::comm {
namespace {

TEST(Group, ShardAndReplicaGroupsDivideTheRanks) {
  for (const auto& [world, size] : {std::pair{4, 2}, {4, 1}, {4, 4}, {12, 3}, {1, 1}})
    for (int rank = 0; rank < world; ++rank) {
      const Group shard = shard_group(rank, world, size), replica = replica_group(rank, world, size);
      EXPECT_EQ(shard.count, size);
      EXPECT_EQ(replica.count * size, world);
      EXPECT_EQ(shard.rank_at(rank % size), rank);
      EXPECT_EQ(replica.rank_at(rank / size), rank);
      for (int other = 0; other < world; ++other) {
        EXPECT_EQ(shard.position_of(other), other / size == rank / size ? other % size : -1);
        EXPECT_EQ(replica.position_of(other), other % size == rank % size ? other / size : -1);
      }
    }
}

TEST(Group, SizesThatDoNotDivideAreErrors) {
  for (const int size : {0, -2, 5, 24}) try {
      (void)shard_group(0, 12, size);
      ADD_FAILURE() << "a group size of " << size << " was accepted";
    } catch (const UsageError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text, "shard groups of " + std::to_string(size) +
                          " ranks do not divide a job of 12; allowed: 1, 2, 3, 4, 6, 12");
    }
  EXPECT_THROW((void)replica_group(0, 12, 5), UsageError);
}

/// All that copy engines need.
PathFacts best() {
  return {.ranks = 8,
          .nodes = 1,
          .peer_access = true,
          .nccl_version = 22809,
          .driver_version = 13000,
          .disabled_by = "",
          .no_window = "",
          .zero_ctas = true,
          .max_ctas = 0};
}

template <class Change>
std::string described(Change change) {
  PathFacts facts = best();
  change(facts);
  return describe_path(facts);
}

TEST(Path, CopyEnginesWhereNothingIsInTheWay) {
  EXPECT_EQ(describe_path(best()), "copy engines in symmetric windows (NCCL 2.28.9)");
  EXPECT_EQ(described([](PathFacts& f) { f.nodes = 2, f.nccl_version = 23006; }),
            "copy engines in symmetric windows (NCCL 2.30.6)");
  EXPECT_EQ(described([](PathFacts& f) { f.ranks = 1; }), "one rank, nothing is sent (NCCL 2.28.9)");
}

TEST(Path, EveryFallbackSaysWhy) {
  const auto because = [](const std::string& reason) {
    return "NCCL's kernels; no copy engines: " + reason + " (NCCL 2.28.9)";
  };
  EXPECT_EQ(described([](PathFacts& f) { f.nodes = 2; }),
            because("the ranks are on 2 nodes, they have to be on one"));
  EXPECT_EQ(described([](PathFacts& f) { f.peer_access = false; }),
            because("the devices have no peer access"));
  EXPECT_EQ(described([](PathFacts& f) { f.driver_version = 12040; }),
            because("the driver is for CUDA 12.4, they need one for CUDA 12.5"));
  EXPECT_EQ(described([](PathFacts& f) { f.disabled_by = "NCCL_WIN_ENABLE=0"; }),
            because("NCCL_WIN_ENABLE=0 is set"));
  EXPECT_EQ(described([](PathFacts& f) { f.no_window = "no arena is registered"; }),
            because("no arena is registered"));
  EXPECT_EQ(described([](PathFacts& f) { f.nccl_version = 22706, f.max_ctas = 4; }),
            "NCCL's kernels on at most 4 CTAs; no copy engines: they need NCCL 2.28.0 (NCCL 2.27.6)");
}

TEST(Path, KernelsUseWindowsToo) {
  const auto with = [](auto change) {
    return described([&](PathFacts& f) {
      f.zero_ctas = false;
      f.driver_version = 12000;  // matters to copy engines only
      change(f);
    });
  };
  EXPECT_EQ(with([](PathFacts&) {}), "NCCL's kernels in symmetric windows (NCCL 2.28.9)");
  EXPECT_EQ(with([](PathFacts& f) { f.max_ctas = 16; }),
            "NCCL's kernels on at most 16 CTAs in symmetric windows (NCCL 2.28.9)");
  EXPECT_EQ(with([](PathFacts& f) { f.nodes = 3; }),
            "NCCL's kernels; no symmetric windows: the ranks are on 3 nodes, they have to be on one "
            "(NCCL 2.28.9)");
}

TEST(Path, TheEnvironmentTurnsWindowsOff) {
  unsetenv("NCCL_WIN_ENABLE"), unsetenv("NCCL_CUMEM_ENABLE");
  EXPECT_EQ(windows_disabled_by(), "");
  setenv("NCCL_CUMEM_ENABLE", "0", 1);
  EXPECT_EQ(windows_disabled_by(), "NCCL_CUMEM_ENABLE=0");
  setenv("NCCL_CUMEM_ENABLE", "1", 1);
  EXPECT_EQ(windows_disabled_by(), "");
  setenv("NCCL_WIN_ENABLE", "0", 1);
  EXPECT_EQ(windows_disabled_by(), "NCCL_WIN_ENABLE=0");
}

}  // namespace
}  // namespace minillm::comm
