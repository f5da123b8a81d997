// derive_waits against find_hazards, and find_hazards against schedules written by hand.
#include "shard/waits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "core/error.h"
#include "fixtures.h"
#include "shard/hazards.h"

namespace minillm::shard {
namespace {

using Waits = std::vector<std::vector<Wait>>;

std::string explain(const std::vector<Hazard>& hazards, const Schedule& schedule) {
  std::string text;
  for (const Hazard& hazard : hazards) text += describe(hazard, schedule, {}) + "\n";
  return text;
}

// Safe as derived, and unsafe without any one of the waits. Returns the number of waits.
int expect_sufficient_and_minimal(const Schedule& schedule) {
  Waits waits = derive_waits(schedule);
  EXPECT_EQ(explain(find_hazards(schedule, waits), schedule), "");
  int count = 0;
  for (size_t i = 0; i < waits.size(); ++i)
    for (size_t w = 0; w < waits[i].size(); ++w, ++count) {
      const std::vector<Wait> all = waits[i];
      const Wait removed = all[w];
      waits[i].erase(waits[i].begin() + static_cast<std::ptrdiff_t>(w));
      const std::vector<Hazard> hazards = find_hazards(schedule, waits);
      const bool named = std::any_of(hazards.begin(), hazards.end(), [&](const Hazard& hazard) {
        return hazard.first == removed.operation && hazard.second == static_cast<int>(i) &&
               hazard.steps_back == removed.steps_back;
      });
      EXPECT_TRUE(named) << describe(schedule.operations[i], {}) << " without its wait for "
                         << describe(schedule.operations[static_cast<size_t>(removed.operation)], {}) << ", "
                         << removed.steps_back << " steps back";
      waits[i] = all;
    }
  return count;
}

TEST(Waits, AreSufficientAndMinimalForModelsOfAllSizes) {
  for (int blocks : {0, 1, 2, 3, 6, 12})
    for (int world : {1, 2, 4})
      for (int slots : {2, 3, 4}) {
        SCOPED_TRACE("blocks " + std::to_string(blocks) + " world " + std::to_string(world) + " slots " +
                     std::to_string(slots));
        const int count = expect_sufficient_and_minimal(
            build_schedule(make_layout(make_units(blocks), world), DeclaredProgram(), {slots, slots - 1}));
        EXPECT_GT(count, 0);
      }
}

TEST(Waits, AreSufficientAndMinimalForRandomModelsAndBuffers) {
  int count = 0;
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const RandomCase random = make_random_case(seed);
    count += expect_sufficient_and_minimal(build_schedule(random.layout, random.program, random.policy));
  }
  EXPECT_GT(count, 300 * 5);
}

// No structure at all: any stream, any regions.
Schedule random_schedule(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](unsigned n) { return static_cast<int>(random() % n); };
  Schedule schedule;
  for (int i = 1 + below(20); i > 0; --i) {
    Operation operation{.kind = OpKind::kForward,
                        .unit = i,
                        .stream = static_cast<StreamId>(below(kStreamCount)),
                        .reads = {},
                        .writes = {}};
    for (int n = below(3); n > 0; --n) operation.reads.push_back({RegionKind::kBuffer, below(6)});
    for (int n = below(3); n > 0; --n) operation.writes.push_back({RegionKind::kBuffer, below(6)});
    schedule.operations.push_back(operation);
  }
  return schedule;
}

TEST(Waits, AreSufficientAndMinimalForSchedulesWithoutStructure) {
  for (unsigned seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    expect_sufficient_and_minimal(random_schedule(seed));
  }
}

TEST(Waits, NeverNameAnEventThatIsRecordedTooLate) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    const Schedule schedule = random_schedule(seed);
    const Waits waits = derive_waits(schedule);
    for (int i = 0; i < static_cast<int>(waits.size()); ++i)
      for (const Wait& wait : waits[static_cast<size_t>(i)]) {
        // One event per operation is enough: its last record is the one that is meant.
        if (wait.steps_back == 0)
          EXPECT_LT(wait.operation, i);
        else
          EXPECT_GT(wait.operation, i);
        EXPECT_NE(schedule.operations[static_cast<size_t>(wait.operation)].stream,
                  schedule.operations[static_cast<size_t>(i)].stream);
      }
  }
}

// What the step promises: gathers of a step wait for the first updates of the step before, not for all of it.
TEST(Waits, FirstGathersWaitForTheirOwnUpdateOnly) {
  const Schedule schedule = build_schedule(make_layout(make_units(4), 2), DeclaredProgram(), {});
  const Waits waits = derive_waits(schedule);
  int found = 0;
  for (size_t i = 0; i < waits.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    if (operation.kind == OpKind::kForward) break;
    if (operation.kind != OpKind::kGather) continue;
    ASSERT_EQ(waits[i].size(), 1u);
    EXPECT_EQ(waits[i][0].steps_back, 1);
    const Operation& update = schedule.operations[static_cast<size_t>(waits[i][0].operation)];
    EXPECT_EQ(update.kind, OpKind::kUpdate);
    EXPECT_EQ(update.unit, operation.unit);
    ++found;
  }
  EXPECT_EQ(found, 3);
}

Operation on(StreamId stream, std::vector<int> reads, std::vector<int> writes) {
  Operation operation{.kind = OpKind::kForward, .unit = 0, .stream = stream, .reads = {}, .writes = {}};
  for (int buffer : reads) operation.reads.push_back({RegionKind::kBuffer, buffer});
  for (int buffer : writes) operation.writes.push_back({RegionKind::kBuffer, buffer});
  return operation;
}
constexpr StreamId kC = StreamId::kCompute, kG = StreamId::kGather, kR = StreamId::kReduce;

Schedule of(std::vector<Operation> operations) {
  Schedule schedule;
  schedule.operations = std::move(operations);
  return schedule;
}

// Hazards as {first, second, steps_back}.
std::vector<std::array<int, 3>> pairs(const Schedule& schedule, const Waits& waits) {
  std::vector<std::array<int, 3>> result;
  for (const Hazard& hazard : find_hazards(schedule, waits))
    result.push_back({hazard.first, hazard.second, hazard.steps_back});
  return result;
}
using Pairs = std::vector<std::array<int, 3>>;

TEST(Hazards, ReadAfterWriteAndWriteAfterRead) {
  const Schedule schedule = of({on(kG, {}, {0}), on(kC, {0}, {})});
  // The gather of the next step overwrites what this step reads.
  EXPECT_EQ(pairs(schedule, {{}, {}}), (Pairs{{1, 0, 1}, {0, 1, 0}, {0, 1, 1}}));
  EXPECT_EQ(pairs(schedule, {{}, {{0, 0}}}), (Pairs{{1, 0, 1}}));
  EXPECT_EQ(pairs(schedule, {{{1, 1}}, {}}), (Pairs{{0, 1, 0}, {0, 1, 1}}));
  EXPECT_EQ(pairs(schedule, {{{1, 1}}, {{0, 1}}}), (Pairs{{0, 1, 0}}));
  EXPECT_EQ(pairs(schedule, {{{1, 1}}, {{0, 0}}}), Pairs{});
  EXPECT_EQ(derive_waits(schedule), (Waits{{{1, 1}}, {{0, 0}}}));
  EXPECT_EQ(find_hazards(schedule, {{}, {{0, 0}}})[0].region, (Region{RegionKind::kBuffer, 0}));
}

TEST(Hazards, WriteAfterWrite) {
  const Schedule schedule = of({on(kC, {}, {0}), on(kR, {}, {0})});
  EXPECT_EQ(pairs(schedule, {{}, {}}), (Pairs{{1, 0, 1}, {0, 1, 0}, {0, 1, 1}}));
  EXPECT_EQ(pairs(schedule, {{{1, 1}}, {{0, 0}}}), Pairs{});
}

TEST(Hazards, ReadsDoNotConflict) {
  EXPECT_TRUE(find_hazards(of({on(kC, {0}, {}), on(kG, {0}, {}), on(kR, {0}, {})}), {{}, {}, {}}).empty());
}

TEST(Hazards, OrderTravelsThroughOtherStreams) {
  // 0 -> 1 by a wait, 1 -> 2 by a wait, so 0 -> 2 without one.
  const Schedule schedule = of({on(kC, {}, {0}), on(kG, {}, {}), on(kR, {0}, {})});
  EXPECT_TRUE(find_hazards(schedule, {{{2, 1}}, {{0, 0}}, {{1, 0}}}).empty());
  EXPECT_EQ(pairs(schedule, {{{2, 1}}, {}, {{1, 0}}}), (Pairs{{0, 2, 0}, {0, 2, 1}}));
  EXPECT_EQ(pairs(schedule, {{{2, 1}}, {{0, 0}}, {}}), (Pairs{{0, 2, 0}, {0, 2, 1}}));
}

TEST(Hazards, AWaitDoesNotCoverWhatItsStreamDoesLater) {
  const Schedule schedule = of({on(kG, {}, {0}), on(kG, {}, {1}), on(kC, {1}, {})});
  EXPECT_EQ(pairs(schedule, {{}, {{2, 1}}, {{0, 0}}}), (Pairs{{1, 2, 0}}));
  EXPECT_TRUE(find_hazards(schedule, {{}, {{2, 1}}, {{1, 0}}}).empty());
}

TEST(Hazards, AreExplained) {
  Schedule schedule = build_schedule(make_layout(make_units(1), 2), DeclaredProgram(), {});
  Waits waits = derive_waits(schedule);
  const auto forward = std::find_if(
      schedule.operations.begin(), schedule.operations.end(),
      [](const Operation& operation) { return operation.kind == OpKind::kForward && operation.unit == 1; });
  waits[static_cast<size_t>(forward - schedule.operations.begin())].clear();
  const std::vector<Hazard> hazards = find_hazards(schedule, waits);
  ASSERT_EQ(hazards.size(), 1u);
  EXPECT_EQ(describe(hazards[0], schedule, {"embedding", "block0", "head"}),
            "weight slot 0: 'forward block0 (weight slot 0)' on the compute stream does not wait for "
            "'gather block0 -> weight slot 0' on the gather stream");
}

// Faults planted in a real step: an access that the waits were not derived from.
TEST(Hazards, FindsAccessesThatTheWaitsDoNotKnow) {
  const Schedule schedule = build_schedule(make_layout(make_units(6), 2), DeclaredProgram(), {});
  const Waits waits = derive_waits(schedule);
  const auto find = [](const Schedule& in, OpKind kind, int unit) {
    return std::find_if(
               in.operations.begin(), in.operations.end(),
               [&](const Operation& operation) { return operation.kind == kind && operation.unit == unit; }) -
           in.operations.begin();
  };
  Schedule wrong_slot = schedule;  // block 3 reads the slot that is being filled for block 4
  wrong_slot.operations[static_cast<size_t>(find(wrong_slot, OpKind::kForward, 3))].reads = {
      {RegionKind::kWeightSlot,
       schedule.operations[static_cast<size_t>(find(schedule, OpKind::kForward, 4))].weight_slot}};
  EXPECT_FALSE(find_hazards(wrong_slot, waits).empty());
  Schedule early_update = schedule;  // an update in the backward pass, while the gradient is still reduced
  early_update.operations[static_cast<size_t>(find(early_update, OpKind::kBackward, 5))].writes.push_back(
      {RegionKind::kGradientShard, 6});
  EXPECT_FALSE(find_hazards(early_update, waits).empty());
}

TEST(Hazards, RefusesWaitsThatCannotBeMet) {
  const Schedule schedule = of({on(kC, {}, {}), on(kG, {}, {})});
  EXPECT_THROW(find_hazards(schedule, {{}}), InternalError);
  EXPECT_THROW(find_hazards(schedule, {{{1, 0}}, {}}), InternalError);
  EXPECT_THROW(find_hazards(schedule, {{{0, 0}}, {}}), InternalError);
  EXPECT_THROW(find_hazards(schedule, {{}, {{2, 1}}}), InternalError);
  EXPECT_THROW(find_hazards(schedule, {{}, {{-1, 1}}}), InternalError);
  EXPECT_THROW(find_hazards(schedule, {{}, {{0, 2}}}), InternalError);
}

}  // namespace
}  // namespace minillm::shard
