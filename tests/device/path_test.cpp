// Groups of ranks; which way NCCL is asked to move data, and the line that tells of it, as a table over
// versions of NCCL, devices and numbers of ranks.
#include "comm/path.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/introduction.h"
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

/// All that copy engines need, on H100s.
PathFacts best() {
  return {.ranks = 8,
          .node_ranks = 8,
          .compute_capability = 90,
          .nccl_version = 23102,
          .driver_version = 13000,
          .zero_ctas = true};
}

template <class Change>
Path path_with(Change change) {
  PathFacts facts = best();
  change(facts);
  return choose_path(facts);
}

template <class Change>
std::string described(Change change) {
  return path_with(change).text;
}

TEST(Path, CopyEnginesWhereNothingIsInTheWay) {
  EXPECT_EQ(choose_path(best()).text, "copy engines in symmetric windows (NCCL 2.31.2)");
  EXPECT_EQ(described([](PathFacts& f) { f.nodes = 2, f.nccl_version = 23007; }),
            "copy engines in symmetric windows (NCCL 2.30.7)");
  EXPECT_EQ(described([](PathFacts& f) { f.ranks = 1; }), "one rank, nothing is sent (NCCL 2.31.2)");
}

TEST(Path, EveryFallbackSaysWhy) {
  const auto because = [](const std::string& reason) {
    return "NCCL's kernels; no copy engines: " + reason + " (NCCL 2.31.2)";
  };
  EXPECT_EQ(described([](PathFacts& f) { f.peer_access = false; }),
            because("the devices have no peer access"));
  EXPECT_EQ(described([](PathFacts& f) { f.virtual_memory = false; }),
            because("a device has no virtual memory management"));
  EXPECT_EQ(described([](PathFacts& f) { f.windows_off_by = "NCCL_WIN_ENABLE=0"; }),
            because("NCCL_WIN_ENABLE=0 is set"));
  EXPECT_EQ(described([](PathFacts& f) { f.no_window = "no arena is registered"; }),
            because("no arena is registered"));
  EXPECT_EQ(
      described([](PathFacts& f) { f.nodes = 2, f.compute_capability = 80, f.nccl_version = 22809; }),
      "NCCL's kernels; no copy engines: the ranks are on 2 nodes, they have to be on one (NCCL 2.28.9)");
  EXPECT_EQ(
      described([](PathFacts& f) { f.driver_version = 12040; }),
      "NCCL's kernels in symmetric windows; no copy engines: the driver is for CUDA 12.4, they need one "
      "for CUDA 12.5 (NCCL 2.31.2)");
  EXPECT_EQ(described([](PathFacts& f) { f.copy_engines_off_by = "NCCL_CTA_POLICY=0"; }),
            "NCCL's kernels in symmetric windows; no copy engines: NCCL_CTA_POLICY=0 is set (NCCL 2.31.2)");
  EXPECT_EQ(described([](PathFacts& f) { f.nccl_version = 22706, f.max_ctas = 4; }),
            "NCCL's kernels on at most 4 CTAs in symmetric windows; no copy engines: they need NCCL 2.28.0 "
            "(NCCL 2.27.6)");
}

TEST(Path, KernelsUseWindowsToo) {
  const auto with = [](auto change) {
    return described([&](PathFacts& f) {
      f.zero_ctas = false;
      f.driver_version = 12000;  // both of these matter to copy engines only
      f.copy_engines_off_by = "NCCL_CTA_POLICY=0";
      change(f);
    });
  };
  EXPECT_EQ(with([](PathFacts&) {}), "NCCL's kernels in symmetric windows (NCCL 2.31.2)");
  EXPECT_EQ(with([](PathFacts& f) { f.max_ctas = 16; }),
            "NCCL's kernels on at most 16 CTAs in symmetric windows (NCCL 2.31.2)");
  EXPECT_EQ(with([](PathFacts& f) { f.nodes = 3; }),
            "NCCL's kernels; no symmetric windows: the ranks are on 3 nodes, they have to be on one "
            "(NCCL 2.31.2)");
}

/// NCCL's versions around the two faults.
constexpr int kVersions[] = {22707, 22800, 22809, 22906, 22907, 23004, 23006, 23007, 23101, 23102, 23203};

TEST(Path, KernelsHaveNoWindowInVersionsThatReadItTooEarly) {
  for (const int version : kVersions)
    for (const int capability : {80, 89, 90, 100, 120}) {
      SCOPED_TRACE("NCCL " + std::to_string(version) + " on " + std::to_string(capability));
      const bool faulty = version >= 22800 && version < 23007 && capability >= 90;
      const auto with = [&](auto change) {
        return path_with([&](PathFacts& f) {
          f.nccl_version = version, f.compute_capability = capability;
          change(f);
        });
      };
      const Path sums = with([](PathFacts& f) { f.zero_ctas = false; });
      EXPECT_EQ(sums.window, !faulty);
      EXPECT_EQ(
          sums.text.find("no symmetric windows: kernels may read them too early, which NCCL 2.30.7 mends") !=
              std::string::npos,
          faulty)
          << sums.text;
      const Path gathers = with([](PathFacts&) {});
      EXPECT_TRUE(gathers.window) << "copies do not need to wait";
      EXPECT_TRUE(gathers.zero_ctas);
      // Copy engines are asked for, but there are kernels in their place.
      EXPECT_EQ(with([](PathFacts& f) { f.driver_version = 12040; }).window, !faulty);
      EXPECT_EQ(with([](PathFacts& f) { f.nodes = 2; }).window, !faulty);
      EXPECT_EQ(with([](PathFacts& f) { f.peer_access = false; }).window, !faulty);
      EXPECT_EQ(with([](PathFacts& f) { f.virtual_memory = false; }).window, !faulty);
      EXPECT_EQ(with([](PathFacts& f) { f.windows_off_by = "NCCL_WIN_ENABLE=0"; }).window, !faulty);
      EXPECT_EQ(with([](PathFacts& f) { f.copy_engines_off_by = "NCCL_CTA_POLICY=1"; }).window, !faulty);
    }
}

TEST(Path, TwoRanksOfANodeHaveNoCopyEnginesInVersionsThatHang) {
  for (const int version : kVersions)
    for (const int capability : {80, 90, 100})
      for (const int node_ranks : {1, 2, 3, 4}) {
        SCOPED_TRACE("NCCL " + std::to_string(version) + " on " + std::to_string(capability) + ", " +
                     std::to_string(node_ranks) + " ranks");
        const auto with = [&](bool zero_ctas) {
          return path_with([&](PathFacts& f) {
            f.nccl_version = version, f.compute_capability = capability, f.zero_ctas = zero_ctas;
            f.ranks = f.node_ranks = node_ranks;
            if (node_ranks == 1) f.ranks = f.nodes = 2;
          });
        };
        const bool hangs = node_ranks == 2 && version >= 22907 && version < 23102 && capability >= 90;
        const bool too_early = version >= 22800 && version < 23007 && capability >= 90;
        const bool copies = version >= 22800 && !hangs && node_ranks > 1;
        const Path gathers = with(true), sums = with(false);
        EXPECT_EQ(gathers.zero_ctas, !hangs);
        EXPECT_FALSE(sums.zero_ctas);
        EXPECT_EQ(gathers.text.find("no copy engines: two ranks of a node may wait for each other for ever, "
                                    "which NCCL 2.31.2 mends") != std::string::npos,
                  hangs)
            << gathers.text;
        if (node_ranks > 1) {
          EXPECT_EQ(gathers.text.starts_with("copy engines"), copies) << gathers.text;
        }
        // From 10.0 on NCCL takes copy engines unasked; kernels where it does not.
        EXPECT_EQ(sums.window, !too_early && !(hangs && capability == 100));
        if (hangs) {
          EXPECT_EQ(gathers.window, sums.window);
        }
      }
}

TEST(Path, BothReasonsAreTold) {
  EXPECT_EQ(
      described([](PathFacts& f) { f.ranks = f.node_ranks = 2, f.nccl_version = 22907; }),
      "NCCL's kernels; no copy engines: two ranks of a node may wait for each other for ever, which NCCL "
      "2.31.2 mends; no symmetric windows: kernels may read them too early, which NCCL 2.30.7 mends "
      "(NCCL 2.29.7)");
}

TEST(Path, TwoRanksOnEachOfSeveralNodesCount) {
  const auto hierarchical = [](PathFacts& f) { f.nodes = 4, f.node_ranks = 2, f.nccl_version = 23007; };
  EXPECT_FALSE(path_with(hierarchical).zero_ctas);
}

TEST(Path, GraphsBetweenNodesAreRemarkedOnInOldVersions) {
  for (const int version : {22809, 23003, 23004, 23102})
    for (const int nodes : {1, 2}) {
      PathFacts facts = best();
      facts.nccl_version = version, facts.nodes = nodes;
      EXPECT_EQ(graph_remark(facts).empty(), nodes == 1 || version >= 23004) << version << " " << nodes;
    }
  PathFacts facts = best();
  facts.nccl_version = 22809, facts.nodes = 2;
  EXPECT_EQ(
      graph_remark(facts),
      "a CUDA graph with collectives between nodes may deadlock with NCCL 2.28.9: if steps time out, use "
      "NCCL 2.30.4 or newer, or set train.cuda_graph=false");
}

TEST(Path, TheEnvironmentTurnsWindowsOff) {
  unsetenv("NCCL_WIN_ENABLE"), unsetenv("NCCL_CUMEM_ENABLE");
  EXPECT_EQ(windows_off_by(), "");
  setenv("NCCL_CUMEM_ENABLE", "0", 1);
  EXPECT_EQ(windows_off_by(), "NCCL_CUMEM_ENABLE=0");
  setenv("NCCL_CUMEM_ENABLE", "1", 1);
  EXPECT_EQ(windows_off_by(), "");
  setenv("NCCL_WIN_ENABLE", "0", 1);
  EXPECT_EQ(windows_off_by(), "NCCL_WIN_ENABLE=0");
}

TEST(Path, TheEnvironmentTurnsCopyEnginesOff) {
  unsetenv("NCCL_CTA_POLICY");
  EXPECT_EQ(copy_engines_off_by(), "");
  for (const char* on : {"2", "ZERO", "default|zero"}) {
    setenv("NCCL_CTA_POLICY", on, 1);
    EXPECT_EQ(copy_engines_off_by(), "") << on;
  }
  for (const char* off : {"0", "1", "EFFICIENCY", "12"}) {
    setenv("NCCL_CTA_POLICY", off, 1);
    EXPECT_EQ(copy_engines_off_by(), std::string("NCCL_CTA_POLICY=") + off);
  }
}

std::vector<Introduction> on_nodes(const std::string& nodes) {
  std::vector<Introduction> all(nodes.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    all[rank].node[0] = nodes[rank];
    all[rank].nccl_version = 23102, all[rank].driver_version = 13000, all[rank].compute_capability = 80;
    all[rank].virtual_memory = true;
  }
  return all;
}

TEST(Introductions, TellWhatDecidesForTheWholeGroup) {
  std::vector<Introduction> all = on_nodes("aabb");
  PathFacts facts = facts_of(all, {.first = 0, .stride = 1, .count = 4});
  EXPECT_EQ(facts.ranks, 4);
  EXPECT_EQ(facts.nodes, 2);
  EXPECT_EQ(facts.compute_capability, 80);
  EXPECT_TRUE(facts.virtual_memory);
  all[1].compute_capability = 90, all[2].driver_version = 12040, all[3].nccl_version = 22809;
  all[3].virtual_memory = false;
  std::strcpy(all[2].windows_off_by, "NCCL_WIN_ENABLE=0");
  std::strcpy(all[1].copy_engines_off_by, "NCCL_CTA_POLICY=0");
  facts = facts_of(all, {.first = 0, .stride = 1, .count = 4});
  EXPECT_EQ(facts.compute_capability, 90);
  EXPECT_EQ(facts.driver_version, 12040);
  EXPECT_EQ(facts.nccl_version, 22809);
  EXPECT_FALSE(facts.virtual_memory);
  EXPECT_EQ(facts.windows_off_by, "NCCL_WIN_ENABLE=0");
  EXPECT_EQ(facts.copy_engines_off_by, "NCCL_CTA_POLICY=0");
  facts = facts_of(all, {.first = 0, .stride = 2, .count = 2});  // others do not matter
  EXPECT_EQ(facts.compute_capability, 80);
  EXPECT_TRUE(facts.virtual_memory);
}

TEST(Introductions, CountTheRanksThatWaitForEachOther) {
  const auto count = [](const std::string& nodes, int stride = 1) {
    const int ranks = static_cast<int>(nodes.size()) / stride;
    return facts_of(on_nodes(nodes), {.first = 0, .stride = stride, .count = ranks}).node_ranks;
  };
  EXPECT_EQ(count("a"), 1);
  EXPECT_EQ(count("aa"), 2);
  EXPECT_EQ(count("aaa"), 3);
  EXPECT_EQ(count("aabb"), 2);
  EXPECT_EQ(count("aaaabbbb"), 4);
  EXPECT_EQ(count("aaaabb"), 2);
  EXPECT_EQ(count("abab"), 1);
  EXPECT_EQ(count("aaaabbbb", 2), 2);
}

}  // namespace
}  // namespace minillm::comm
