// What the builder promises that a count shows; builder_listing_test.cpp has what a listing, and
// slot_replay_test.cpp what replaying it shows.
#include "shard/builder.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "fixtures.h"
#include "shard/turns.h"

namespace minillm::shard {
namespace {

Schedule build(int blocks, int world, Policy policy = {}) {
  return build_schedule(make_layout(make_units(blocks), world), DeclaredProgram(), policy);
}

int64_t count(const Schedule& schedule, OpKind kind) {
  return std::count_if(schedule.operations.begin(), schedule.operations.end(),
                       [&](const Operation& operation) { return operation.kind == kind; });
}

TEST(Builder, RegionsAreDescribed) {
  const std::vector<std::string> names = {"embedding", "block0"};
  EXPECT_EQ(describe(Region{RegionKind::kParameterShard, 1}, names), "parameter shard of block0");
  EXPECT_EQ(describe(Region{RegionKind::kOptimizerShard, 0, 2}, names),
            "optimizer shard of embedding segment 2");
  EXPECT_EQ(describe(Region{RegionKind::kGradientShard, 5}, names), "shard slot 5");
  EXPECT_EQ(describe(Region{RegionKind::kWeightSlot, 1}, names), "weight slot 1");
  EXPECT_EQ(describe(Region{RegionKind::kGradientSlot, 1, 1}, names), "gradient slot 1 part 1");
  EXPECT_EQ(describe(Region{RegionKind::kBuffer, 3}, names), "buffer 3");
  EXPECT_EQ(describe(Region{RegionKind::kNormPartial, 7}, names), "norm partial of unit 7");
  EXPECT_EQ(describe(Region{RegionKind::kLossTotal}, names), "loss total");
}

TEST(Builder, GatherCounts) {
  EXPECT_EQ(count(build(12, 8), OpKind::kGather), 12 + 10 + 2);
  for (int blocks : {1, 2, 3, 5, 12, 31})
    for (int slots : {2, 3, 4, 8, 40}) {
      const int again = std::max(0, blocks - slots);  // not in a slot any more when backward needs them
      EXPECT_EQ(count(build(blocks, 4, {.weight_slots = slots}), OpKind::kGather), blocks + again + 2)
          << blocks << " blocks, " << slots << " slots";
    }
}

// Deferred blocks are gathered once more where there are more of them than slots.
TEST(Builder, GatherCountsOfDeferredBlocks) {
  for (int slots : {2, 3, 4, 8})
    for (int deferred : {1, 2, 3, 5}) {
      const auto gathers =
          count(build(12, 8, {.weight_slots = slots, .deferred_blocks = deferred}), OpKind::kGather);
      const int again = 12 - slots, missing = std::max(0, deferred - slots);
      EXPECT_EQ(gathers, 12 + again + 2 + missing) << slots << " slots, " << deferred << " deferred";
    }
}

TEST(Builder, SlotsAreNoMoreThanUnitsAndAsLongAsTheLongest) {
  const Layout layout = make_layout(make_units(3, 20), 2);
  const Schedule schedule =
      build_schedule(layout, DeclaredProgram(), {.weight_slots = 8, .gradient_slots = 1});
  ASSERT_EQ(schedule.weight_slots.size(), 4u);
  ASSERT_EQ(schedule.gradient_slots.size(), 1u);
  EXPECT_EQ(schedule.weight_slots[3].group, 1);
  EXPECT_EQ(schedule.weight_slots[0].elements, layout.units[1].padded_elements);
  EXPECT_EQ(schedule.weight_slots[3].elements,
            std::max(layout.units.front().padded_elements, layout.units.back().padded_elements));
}

TEST(Builder, GradientSlotsAreNoMoreThanThePolicyAllows) {
  for (unsigned seed = 0; seed < 1000; ++seed) {
    const RandomCase random = make_random_case(seed);
    const std::vector<Turn> turns = make_turns(random.layout, random.policy);
    const int blocks = static_cast<int>(random.layout.units.size()) - 2;
    const int deferred = std::min(random.policy.deferred_blocks, blocks);
    const GradientPlan plan = plan_gradients(turns, random.policy.gradient_slots, false);
    EXPECT_LE(plan.slots, random.policy.gradient_slots + (deferred > 0 ? deferred + 1 : 0)) << seed;
    EXPECT_EQ(plan_gradients(turns, random.policy.gradient_slots, true).slots, blocks + 2) << seed;
    for (size_t i = 0; i < turns.size(); ++i)
      EXPECT_EQ(plan.slot_of_turn[i] >= 0, turns[i].gradients != Gradients::kNone) << seed << ", turn " << i;
  }
}

TEST(Builder, ShardSlotsAreAPieceOfTheirUnitsAndFewUnlessShardsHaveToLast) {
  const Layout layout = make_layout(make_units(6), 2);
  const auto slots = [&](const Policy& policy) {
    return build_schedule(layout, DeclaredProgram(), policy).shard_slots.size();
  };
  EXPECT_EQ(slots({}), 2u);
  EXPECT_EQ(slots({.gradient_slots = 3, .deferred_blocks = 2}), 3u);
  EXPECT_EQ(slots({.clip = true}), 8u);
  EXPECT_EQ(slots({.keep_gradients = true}), 8u);
  EXPECT_EQ(slots({.micro_batches = 2}), 8u);
}

TEST(Builder, ASingleRankHasNoSlotsOfGatheredMemoryAndNoCollectives) {
  const Schedule schedule = build(4, 1, {.deferred_blocks = 1, .reduce_type = DType::kBf16});
  EXPECT_TRUE(schedule.weight_slots.empty());
  EXPECT_TRUE(schedule.gradient_slots.empty());
  EXPECT_EQ(schedule.wire_elements, 0);
  EXPECT_EQ(schedule.reduced_elements, 0);
  for (const Operation& operation : schedule.operations) {
    EXPECT_FALSE(is_collective(operation.kind)) << describe(operation, {});
    EXPECT_EQ(operation.weight_slot, -1);
    EXPECT_EQ(operation.gradient_slot, -1);
  }
}

TEST(Builder, BuffersOfTheProgramBecomeRegions) {
  DeclaredProgram program;
  program.specs.resize(4);
  for (const auto& call : compute_calls(4)) program.table[call] = {{0, 1}, {2}};
  const Schedule schedule = build_schedule(make_layout(make_units(2), 2), program,
                                           {.deferred_blocks = 1, .reduce_type = DType::kBf16});
  const auto has = [](const std::vector<Region>& regions, int buffer) {
    return std::count(regions.begin(), regions.end(), Region{RegionKind::kBuffer, buffer}) == 1;
  };
  for (const Operation& operation : schedule.operations) {
    EXPECT_EQ(has(operation.reads, 0) && has(operation.reads, 1) && has(operation.writes, 2),
              !is_collective(operation.kind))
        << describe(operation, {});
    EXPECT_FALSE(has(operation.writes, 3));
  }
}

TEST(Builder, RefusesPoliciesByName) {
  const auto message = [](Policy policy) -> std::string {
    try {
      build(2, 2, policy);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({.weight_slots = 1}),
            "parallel.weight_slots is 1; it must be 2 or more, because one block is gathered while another "
            "computes. Use 2, the default.");
  EXPECT_NE(message({.gradient_slots = 0}).find("parallel.gradient_slots is 0; it must be 1 or more"),
            std::string::npos);
  EXPECT_EQ(message({.gradient_slots = 1}), "no error");
  EXPECT_THROW(build_schedule(make_layout({{"u", {{"w", {1}}}}}, 1), DeclaredProgram(), {}), InternalError);
  EXPECT_THROW(build(2, 2, {.replicas = 0}), InternalError);
  EXPECT_THROW(build(2, 2, {.deferred_blocks = -1}), InternalError);
  EXPECT_THROW(build(2, 2, {.micro_batches = 0}), InternalError);
  EXPECT_THROW(build(2, 2, {.recompute = {true}}), InternalError);
}

}  // namespace
}  // namespace minillm::shard
