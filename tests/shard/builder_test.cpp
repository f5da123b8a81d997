// What the builder promises that a listing or a count shows; slot_replay_test.cpp has what replaying it
// shows.
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

std::string listing(const std::vector<UnitSpec>& units, int world, const Policy& policy) {
  const Layout layout = make_layout(units, world);
  std::string text = "\n";
  for (const Operation& operation : build_schedule(layout, DeclaredProgram(), policy).operations)
    text += std::string(name_of(operation.stream)) + ": " + describe(operation, layout.unit_names()) + "\n";
  return text;
}

int64_t count(const Schedule& schedule, OpKind kind) {
  return std::count_if(schedule.operations.begin(), schedule.operations.end(),
                       [&](const Operation& operation) { return operation.kind == kind; });
}

TEST(Builder, ListingOfAShardedStepWithADeferredBlock) {
  EXPECT_EQ(listing(make_segmented_units(3), 2, {.deferred_blocks = 1}), R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 2)
gather: gather head -> weight slot 2
compute: forward block0 (weight slot 0)
gather: gather block2 -> weight slot 0
compute: forward block1 (weight slot 1)
compute: forward block2 (weight slot 0)
compute: loss head (weight slot 2) -> gradient slot 0
reduce: collect loss
reduce: all-reduce loss
reduce: gate
reduce: reduce-scatter head <- gradient slot 0 -> shard slot 0
update: square norm head (shard slot 0)
update: update head (shard slot 0)
compute: backward block2 (weight slot 0) -> gradient slot 1
gather: gather block0 -> weight slot 0
reduce: reduce-scatter block2 <- gradient slot 1 -> shard slot 1
update: square norm block2 (shard slot 1)
update: update block2 (shard slot 1)
compute: backward block1 (weight slot 1) -> gradient slot 0
reduce: reduce-scatter block1 <- gradient slot 0 -> shard slot 0
update: square norm block1 (shard slot 0)
update: update block1 (shard slot 0)
compute: backward input block0 (weight slot 0) -> gradient slot 2
compute: backward embedding -> gradient slot 3
reduce: reduce-scatter embedding <- gradient slot 3 -> shard slot 1
update: square norm embedding (shard slot 1)
update: update embedding (shard slot 1)
gather: gather embedding -> weight slot 2, for the next step
compute: backward weight block0 segment 0 (weight slot 0) -> gradient slot 2
reduce: reduce-scatter block0 segment 0 <- gradient slot 2 -> shard slot 0
update: square norm block0 segment 0 (shard slot 0)
update: update block0 segment 0 (shard slot 0)
compute: backward weight block0 segment 1 (weight slot 0) -> gradient slot 2
gather: gather block0 segment 0 -> weight slot 0, for the next step
reduce: reduce-scatter block0 segment 1 <- gradient slot 2 -> shard slot 0
update: square norm block0 segment 1 (shard slot 0)
update: update block0 segment 1 (shard slot 0)
gather: gather block0 segment 1 -> weight slot 0, for the next step
gather: gather block1 -> weight slot 1, for the next step
update: collect norm
reduce: all-reduce norm
update: clip
update: read back
)");
}

TEST(Builder, ListingOfASingleRank) {
  EXPECT_EQ(listing(make_units(1), 1, {}), R"(
compute: upload
compute: begin
update: set step
compute: forward embedding
compute: forward block0
compute: loss head -> shard slot 0
reduce: collect loss
reduce: gate
update: square norm head (shard slot 0)
update: update head (shard slot 0)
compute: backward block0 -> shard slot 1
update: square norm block0 (shard slot 1)
update: update block0 (shard slot 1)
compute: backward embedding -> shard slot 0
update: square norm embedding (shard slot 0)
update: update embedding (shard slot 0)
update: collect norm
update: clip
update: read back
)");
}

TEST(Builder, ListingOfAStepThatClips) {
  EXPECT_EQ(listing(make_units(1), 2, {.clip = true}), R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 (weight slot 0)
compute: loss head (weight slot 1) -> gradient slot 0
reduce: collect loss
reduce: all-reduce loss
reduce: reduce-scatter head <- gradient slot 0 -> shard slot 2
update: square norm head (shard slot 2)
compute: backward block0 (weight slot 0) -> gradient slot 1
reduce: reduce-scatter block0 <- gradient slot 1 -> shard slot 1
update: square norm block0 (shard slot 1)
compute: backward embedding -> gradient slot 0
reduce: reduce-scatter embedding <- gradient slot 0 -> shard slot 0
update: square norm embedding (shard slot 0)
update: collect norm
reduce: all-reduce norm
update: clip
update: update embedding (shard slot 0)
gather: gather embedding -> weight slot 1, for the next step
update: update block0 (shard slot 1)
gather: gather block0 -> weight slot 0, for the next step
update: update head (shard slot 2)
update: read back
)");
}

TEST(Builder, ListingOfHybridShardingWithAccumulation) {
  EXPECT_EQ(listing(make_units(1), 2, {.replicas = 2, .micro_batches = 2, .reduce_type = DType::kBf16}), R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 (weight slot 0)
compute: loss head (weight slot 1) -> gradient slot 0
gather: gather embedding -> weight slot 1
reduce: cast head <- gradient slot 0
reduce: reduce-scatter head
reduce: accumulate head -> shard slot 2
compute: backward block0 (weight slot 0) -> gradient slot 1
reduce: cast block0 <- gradient slot 1
reduce: reduce-scatter block0
reduce: accumulate block0 -> shard slot 1
compute: backward embedding -> gradient slot 0
reduce: cast embedding <- gradient slot 0
reduce: reduce-scatter embedding
reduce: accumulate embedding -> shard slot 0
compute: forward embedding of micro-batch 1 (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 of micro-batch 1 (weight slot 0)
compute: loss head of micro-batch 1 (weight slot 1) -> gradient slot 1
reduce: collect loss
reduce: all-reduce loss
reduce: gate
reduce: cast head of micro-batch 1 <- gradient slot 1
reduce: reduce-scatter head of micro-batch 1
reduce: accumulate head of micro-batch 1 -> shard slot 2, added
replicate: all-reduce head (shard slot 2)
update: square norm head (shard slot 2)
update: update head (shard slot 2)
compute: backward block0 of micro-batch 1 (weight slot 0) -> gradient slot 0
reduce: cast block0 of micro-batch 1 <- gradient slot 0
reduce: reduce-scatter block0 of micro-batch 1
reduce: accumulate block0 of micro-batch 1 -> shard slot 1, added
replicate: all-reduce block0 (shard slot 1)
update: square norm block0 (shard slot 1)
update: update block0 (shard slot 1)
compute: backward embedding of micro-batch 1 -> gradient slot 1
reduce: cast embedding of micro-batch 1 <- gradient slot 1
reduce: reduce-scatter embedding of micro-batch 1
reduce: accumulate embedding of micro-batch 1 -> shard slot 0, added
replicate: all-reduce embedding (shard slot 0)
update: square norm embedding (shard slot 0)
update: update embedding (shard slot 0)
gather: gather embedding -> weight slot 1, for the next step
gather: gather block0 -> weight slot 0, for the next step
update: collect norm
reduce: all-reduce norm
update: clip
update: read back
)");
}

TEST(Builder, ListingOfUnreducedAccumulationWithRecomputation) {
  EXPECT_EQ(
      listing(make_units(1), 2,
              {.micro_batches = 2, .reduce_every_micro_batch = false, .recompute = {false, true, false}}),
      R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 (weight slot 0)
compute: loss head (weight slot 1) -> gradient slot 2
gather: gather embedding -> weight slot 1
compute: recompute block0 (weight slot 0)
compute: backward block0 (weight slot 0) -> gradient slot 1
compute: backward embedding -> gradient slot 0
compute: forward embedding of micro-batch 1 (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 of micro-batch 1 (weight slot 0)
compute: loss head of micro-batch 1 (weight slot 1) -> gradient slot 2, added
reduce: collect loss
reduce: all-reduce loss
reduce: gate
reduce: reduce-scatter head of micro-batch 1 <- gradient slot 2 -> shard slot 2
update: square norm head (shard slot 2)
update: update head (shard slot 2)
compute: recompute block0 of micro-batch 1 (weight slot 0)
compute: backward block0 of micro-batch 1 (weight slot 0) -> gradient slot 1, added
reduce: reduce-scatter block0 of micro-batch 1 <- gradient slot 1 -> shard slot 1
update: square norm block0 (shard slot 1)
update: update block0 (shard slot 1)
compute: backward embedding of micro-batch 1 -> gradient slot 0, added
reduce: reduce-scatter embedding of micro-batch 1 <- gradient slot 0 -> shard slot 0
update: square norm embedding (shard slot 0)
update: update embedding (shard slot 0)
gather: gather embedding -> weight slot 1, for the next step
gather: gather block0 -> weight slot 0, for the next step
update: collect norm
reduce: all-reduce norm
update: clip
update: read back
)");
}

TEST(Builder, RegionsAreDescribed) {
  const std::vector<std::string> names = {"embedding", "block0"};
  EXPECT_EQ(describe(Region{RegionKind::kParameterShard, 1}, names), "parameter shard of block0");
  EXPECT_EQ(describe(Region{RegionKind::kOptimizerShard, 0, 2}, names),
            "optimizer shard of embedding segment 2");
  EXPECT_EQ(describe(Region{RegionKind::kGradientShard, 5}, names), "shard slot 5");
  EXPECT_EQ(describe(Region{RegionKind::kWeightSlot, 1}, names), "weight slot 1");
  EXPECT_EQ(describe(Region{RegionKind::kGradientSlot, 1, 1}, names), "gradient slot 1 segment 1");
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
      EXPECT_EQ(plan.slot_of_turn[i] >= 0, makes_gradients(turns[i].kind)) << seed << ", turn " << i;
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
