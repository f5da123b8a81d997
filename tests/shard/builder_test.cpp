#include "shard/builder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "core/error.h"
#include "fixtures.h"

namespace minillm::shard {
namespace {

Schedule build(int blocks, int world, Policy policy = {}) {
  return build_schedule(make_layout(make_units(blocks), world), DeclaredProgram(), policy);
}

std::string listing(const Schedule& schedule, const std::vector<std::string>& unit_names) {
  std::string text = "\n";
  for (const Operation& operation : schedule.operations)
    text += std::string(name_of(operation.stream)) + ": " + describe(operation, unit_names) + "\n";
  return text;
}

int64_t count(const Schedule& schedule, OpKind kind) {
  return std::count_if(schedule.operations.begin(), schedule.operations.end(),
                       [&](const Operation& operation) { return operation.kind == kind; });
}

TEST(Builder, ListingOfAShardedStep) {
  const Layout layout = make_layout(make_units(3), 2);
  EXPECT_EQ(listing(build_schedule(layout, DeclaredProgram(), {}), layout.unit_names()), R"(
compute: begin
reduce: all-reduce count
gather: gather embedding -> weight slot 2
gather: gather block0 -> weight slot 0
gather: gather block1 -> weight slot 1
compute: forward embedding (weight slot 2)
gather: gather head -> weight slot 2
compute: forward block0 (weight slot 0)
gather: gather block2 -> weight slot 0
compute: forward block1 (weight slot 1)
compute: forward block2 (weight slot 0)
compute: loss head (weight slot 2) -> gradient slot 2
reduce: reduce-scatter head <- gradient slot 2
reduce: square norm head
compute: backward block2 (weight slot 0) -> gradient slot 0
gather: gather block0 -> weight slot 0
reduce: reduce-scatter block2 <- gradient slot 0
reduce: square norm block2
compute: backward block1 (weight slot 1) -> gradient slot 1
reduce: reduce-scatter block1 <- gradient slot 1
reduce: square norm block1
compute: backward block0 (weight slot 0) -> gradient slot 0
reduce: reduce-scatter block0 <- gradient slot 0
reduce: square norm block0
compute: backward embedding -> gradient slot 2
reduce: reduce-scatter embedding <- gradient slot 2
reduce: square norm embedding
reduce: collect stats
reduce: all-reduce stats
compute: clip
compute: update embedding
compute: update block0
compute: update block1
compute: update block2
compute: update head
compute: read back
)");
}

TEST(Builder, ListingOfASingleRank) {
  EXPECT_EQ(listing(build(1, 1), {}), R"(
compute: begin
compute: forward unit 0
compute: forward unit 1
compute: loss unit 2
reduce: square norm unit 2
compute: backward unit 1
reduce: square norm unit 1
compute: backward unit 0
reduce: square norm unit 0
reduce: collect stats
compute: clip
compute: update unit 0
compute: update unit 1
compute: update unit 2
compute: read back
)");
}

TEST(Builder, RegionsAreDescribed) {
  const std::vector<std::string> names = {"embedding", "block0"};
  EXPECT_EQ(describe(Region{RegionKind::kParameterShard, 1}, names), "parameter shard of block0");
  EXPECT_EQ(describe(Region{RegionKind::kGradientShard, 5}, names), "gradient shard of unit 5");
  EXPECT_EQ(describe(Region{RegionKind::kWeightSlot, 1}, names), "weight slot 1");
  EXPECT_EQ(describe(Region{RegionKind::kBuffer, 3}, names), "buffer 3");
  EXPECT_EQ(describe(Region{RegionKind::kStats}, names), "stats");
}

TEST(Builder, GatherCounts) {
  EXPECT_EQ(count(build(12, 8), OpKind::kGather), 12 + 10 + 2);
  for (int blocks : {1, 2, 3, 5, 12, 31})
    for (int slots : {2, 3, 4, 8, 40}) {
      const int again = std::max(0, blocks - slots);  // not in a slot any more when backward needs them
      EXPECT_EQ(count(build(blocks, 4, {slots, 2}), OpKind::kGather), blocks + again + 2)
          << blocks << " blocks, " << slots << " slots";
    }
}

TEST(Builder, SlotsAreNoMoreThanUnitsAndAsLongAsTheLongest) {
  const Layout layout = make_layout(make_units(3, 20), 2);
  const Schedule schedule = build_schedule(layout, DeclaredProgram(), {8, 1});
  ASSERT_EQ(schedule.weight_slots.size(), 4u);
  ASSERT_EQ(schedule.gradient_slots.size(), 2u);
  EXPECT_EQ(schedule.weight_slots[3].group, 1);
  EXPECT_EQ(schedule.weight_slots[0].elements, layout.units[1].padded_elements);
  EXPECT_EQ(schedule.weight_slots[3].elements,
            std::max(layout.units.front().padded_elements, layout.units.back().padded_elements));
}

TEST(Builder, ASingleRankHasNoSlotsAndNoCollectives) {
  const Schedule schedule = build(4, 1);
  EXPECT_TRUE(schedule.weight_slots.empty());
  EXPECT_TRUE(schedule.gradient_slots.empty());
  for (OpKind kind :
       {OpKind::kGather, OpKind::kReduceScatter, OpKind::kAllReduceCount, OpKind::kAllReduceStats})
    EXPECT_EQ(count(schedule, kind), 0);
  for (const Operation& operation : schedule.operations) {
    EXPECT_EQ(operation.weight_slot, -1);
    EXPECT_EQ(operation.gradient_slot, -1);
  }
}

TEST(Builder, BuffersOfTheProgramBecomeRegions) {
  DeclaredProgram program;
  program.specs.resize(4);
  for (const auto& call : compute_calls(4)) program.table[call] = {{0, 1}, {2}};
  const Schedule schedule = build_schedule(make_layout(make_units(2), 2), program, {});
  const auto has = [](const std::vector<Region>& regions, int buffer) {
    return std::count(regions.begin(), regions.end(), Region{RegionKind::kBuffer, buffer}) == 1;
  };
  for (const Operation& operation : schedule.operations) {
    const bool collective = operation.kind == OpKind::kGather || operation.kind == OpKind::kReduceScatter ||
                            operation.kind == OpKind::kAllReduceCount ||
                            operation.kind == OpKind::kAllReduceStats;
    EXPECT_EQ(has(operation.reads, 0) && has(operation.reads, 1) && has(operation.writes, 2), !collective)
        << describe(operation, {});
    EXPECT_FALSE(has(operation.writes, 3));
  }
}

// Replays the list with slots that know what they hold, and demands that every operation finds what it needs.
class SlotReplay {
 public:
  explicit SlotReplay(const Schedule& schedule)
      : schedule_(schedule),
        weights_(schedule.weight_slots.size(), kEmpty),
        gradients_(schedule.gradient_slots.size(), kEmpty) {}

  void run(int units) {
    for (size_t i = 0; i < schedule_.operations.size(); ++i)
      step(static_cast<int>(i), schedule_.operations[i]);
    for (int u = 0; u < units; ++u) {
      EXPECT_EQ(reduced_[u], schedule_.world > 1 ? 1 : 0) << u;
      EXPECT_EQ(made_[u], 1) << u;
      EXPECT_EQ(updated_[u], 1) << u;
    }
    for (int content : gradients_) EXPECT_EQ(content, kEmpty) << "gradients left unreduced";
  }

 private:
  static constexpr int kEmpty = -1;

  // The unit whose weights are read from a slot next, before the slot is filled again.
  int next_reader(int slot, int after) const {
    for (size_t i = static_cast<size_t>(after) + 1; i < schedule_.operations.size(); ++i) {
      const Operation& operation = schedule_.operations[i];
      if (operation.weight_slot == slot) return operation.kind == OpKind::kGather ? kEmpty : operation.unit;
    }
    return kEmpty;
  }

  void step(int index, const Operation& operation) {
    SCOPED_TRACE(std::to_string(index) + ": " + describe(operation, {}));
    if (operation.kind == OpKind::kGather) {
      EXPECT_EQ(std::count(weights_.begin(), weights_.end(), operation.unit), 0) << "gathered twice in a row";
      EXPECT_EQ(next_reader(operation.weight_slot, index), operation.unit) << "gathered for nobody";
      weights_.at(static_cast<size_t>(operation.weight_slot)) = operation.unit;
    } else if (operation.weight_slot >= 0) {
      EXPECT_EQ(weights_.at(static_cast<size_t>(operation.weight_slot)), operation.unit);
    }
    if (operation.kind == OpKind::kHeadLoss || operation.kind == OpKind::kBackward) ++made_[operation.unit];
    if (operation.kind == OpKind::kUpdate) ++updated_[operation.unit];
    if (operation.gradient_slot < 0) return;
    int& content = gradients_.at(static_cast<size_t>(operation.gradient_slot));
    if (operation.kind == OpKind::kReduceScatter) {
      EXPECT_EQ(content, operation.unit);
      content = kEmpty;
      ++reduced_[operation.unit];
    } else {
      EXPECT_EQ(content, kEmpty) << "overwrites gradients that are not reduced";
      content = operation.unit;
    }
  }

  const Schedule& schedule_;
  std::vector<int> weights_, gradients_;
  std::map<int, int> reduced_, made_, updated_;
};

TEST(Builder, SlotsHoldWhatIsReadForModelsOfAllSizes) {
  for (int blocks : {0, 1, 2, 3, 4, 7, 12})
    for (int world : {1, 2, 4})
      for (int slots : {2, 3, 5}) {
        SCOPED_TRACE("blocks " + std::to_string(blocks) + " world " + std::to_string(world) + " slots " +
                     std::to_string(slots));
        SlotReplay(build(blocks, world, {slots, slots - 1})).run(blocks + 2);
      }
}

TEST(Builder, SlotsHoldWhatIsReadForRandomModels) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    const RandomCase random = make_random_case(seed);
    const Schedule schedule = build_schedule(random.layout, random.program, random.policy);
    SlotReplay(schedule).run(static_cast<int>(random.layout.units.size()));
    for (const Operation& operation : schedule.operations)
      if (operation.weight_slot >= 0) {
        const UnitLayout& unit = random.layout.units[static_cast<size_t>(operation.unit)];
        const Slot& slot = schedule.weight_slots[static_cast<size_t>(operation.weight_slot)];
        EXPECT_EQ(slot.group, unit.slot_group);
        EXPECT_GE(slot.elements, unit.padded_elements);
      }
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
  EXPECT_EQ(message({1, 2}),
            "parallel.weight_slots is 1; it must be 2 or more, because one block is gathered while another "
            "computes. Use 2, the default.");
  EXPECT_NE(message({2, 0}).find("parallel.gradient_slots is 0; it must be 1 or more"), std::string::npos);
  EXPECT_EQ(message({2, 1}), "no error");
  EXPECT_THROW(build_schedule(make_layout({{"u", {{"w", {1}}}}}, 1), DeclaredProgram(), {}), InternalError);
}

}  // namespace
}  // namespace minillm::shard
