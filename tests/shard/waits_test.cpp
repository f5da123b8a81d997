// derive_waits against find_hazards, and find_hazards against schedules written by hand.
#include "shard/waits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>

#include "core/error.h"
#include "fixtures.h"
#include "shard/hazards.h"
#include "stream_replay.h"

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
  for (int blocks : {0, 1, 2, 6})
    for (int world : {1, 2})
      for (int slots : {2, 4})
        for (int deferred : {0, 2}) {
          SCOPED_TRACE("blocks " + std::to_string(blocks) + " world " + std::to_string(world) + " slots " +
                       std::to_string(slots) + " deferred " + std::to_string(deferred));
          const Layout layout = make_layout(make_segmented_units(blocks), world);
          const Policy policy{
              .weight_slots = slots, .gradient_slots = slots - 1, .deferred_blocks = deferred};
          EXPECT_GT(expect_sufficient_and_minimal(build_schedule(layout, DeclaredProgram(), policy)), 0);
        }
}

TEST(Waits, AreSufficientForRandomModelsAndBuffers) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    const RandomCase random = make_random_case(seed);
    const Schedule schedule = build_schedule(random.layout, random.program, random.policy);
    ASSERT_EQ(explain(find_hazards(schedule, derive_waits(schedule)), schedule), "") << "seed " << seed;
  }
}

TEST(Waits, AreMinimalForRandomModelsAndBuffers) {
  int count = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    const RandomCase random = make_random_case(seed);
    count += expect_sufficient_and_minimal(build_schedule(random.layout, random.program, random.policy));
  }
  EXPECT_GT(count, 60 * 20);
}

// The schedule with slots cut where a segment of any unit begins, so that regions are memory. Units of
// several layouts take slots in turn, and one's first segment may reach into another's second.
class ByElements {
 public:
  explicit ByElements(const Layout& layout) : layout_(layout) {
    for (const UnitLayout& unit : layout.units)
      for (const Segment& segment : unit.segments) {
        cuts_[0].insert({segment.offset, segment.offset + segment.padded_elements});
        cuts_[1].insert({segment.shard_offset, segment.shard_offset + segment.shard_elements});
      }
  }

  Schedule operator()(Schedule schedule) const {
    for (Operation& operation : schedule.operations)
      for (auto list : {&Operation::reads, &Operation::writes}) {
        std::set<Region> cut;
        for (const Region& region : operation.*list) add(cut, region, operation);
        (operation.*list).assign(cut.begin(), cut.end());
      }
    return schedule;
  }

 private:
  void add(std::set<Region>& regions, const Region& region, const Operation& operation) const {
    const bool shard = region.kind == RegionKind::kGradientShard,
               weights = region.kind == RegionKind::kWeightSlot;
    if (!shard && !weights && region.kind != RegionKind::kGradientSlot)
      return static_cast<void>(regions.insert(region));
    const auto touches = [&](int64_t element) {
      if (operation.unit < 0) return true;
      // Passes read all weights.
      const int segment = weights && operation.kind != OpKind::kGather ? -1 : operation.segment;
      for (const Segment& s : segments_of(layout_.units[operation.unit], segment)) {
        const int64_t begin = shard ? s.shard_offset : s.offset;
        if (element >= begin && element < begin + (shard ? s.shard_elements : s.padded_elements)) return true;
      }
      return false;
    };
    for (int64_t element : cuts_[shard ? 1 : 0])
      if (touches(element)) regions.insert({region.kind, region.index, static_cast<int>(element)});
  }

  const Layout& layout_;
  std::array<std::set<int64_t>, 2> cuts_;  // of flat buffers, of shards
};

TEST(Waits, AreSufficientForSlotsOfUnitsWithOtherSegments) {
  for (unsigned seed = 0; seed < 1000; ++seed) {
    const RandomCase random = make_random_case(seed);
    const Schedule schedule = build_schedule(random.layout, random.program, random.policy);
    const Schedule memory = ByElements(random.layout)(schedule);
    ASSERT_EQ(explain(find_hazards(memory, derive_waits(schedule)), memory), "") << "seed " << seed;
  }
}

TEST(Waits, NamesOfSegmentsDoNotHideThatTheyOverlap) {
  const Layout layout =
      make_layout({{"a", {{"s", {1}}, {"t", {900}, 0, 1}}}, {"b", {{"s", {900}}, {"t", {1}, 0, 1}}}}, 2);
  Schedule schedule;
  schedule.operations = {{.kind = OpKind::kUpdate,
                          .unit = 0,
                          .stream = StreamId::kUpdate,
                          .segment = 1,
                          .reads = {{RegionKind::kGradientShard, 0, 1}}},
                         {.kind = OpKind::kReduceScatter,
                          .unit = 1,
                          .stream = StreamId::kReduce,
                          .segment = 0,
                          .writes = {{RegionKind::kGradientShard, 0, 0}}}};
  EXPECT_TRUE(find_hazards(schedule, {{}, {}}).empty());
  EXPECT_FALSE(find_hazards(ByElements(layout)(schedule), {{}, {}}).empty());
}

TEST(Waits, EveryOrderOfStreamsEndsAndFindsWhatTheOrderOfIssueFinds) {
  for (unsigned seed = 0; seed < 600; ++seed) {
    const RandomCase random = make_random_case(seed);
    const Schedule schedule = build_schedule(random.layout, random.program, random.policy);
    const Waits waits = derive_waits(schedule);
    ASSERT_EQ(run_streams(schedule, waits, 3, 1 + static_cast<int>(seed % 3), seed), "") << "seed " << seed;
  }
  const Schedule schedule = build_schedule(make_layout(make_segmented_units(4), 2), DeclaredProgram(),
                                           {.deferred_blocks = 2, .micro_batches = 2});
  EXPECT_EQ(run_streams(schedule, derive_waits(schedule), 200, 2, 0), "");
}

TEST(Waits, OrdersOfStreamsShowWaitsThatAreMissingOrCannotBeMet) {
  const Schedule schedule = build_schedule(make_layout(make_segmented_units(4), 2), DeclaredProgram(),
                                           {.replicas = 2, .deferred_blocks = 1});
  const Waits waits = derive_waits(schedule);
  int found = 0, all = 0;
  for (size_t i = 0; i < waits.size(); ++i)
    for (size_t w = 0; w < waits[i].size(); ++w, ++all) {
      Waits fewer = waits;
      fewer[i].erase(fewer[i].begin() + static_cast<std::ptrdiff_t>(w));
      for (unsigned seed = 0; seed < 50; ++seed)
        if (!run_streams(schedule, fewer, 3, 1, seed).empty()) {
          ++found;
          break;
        }
    }
  // Some need many operations to be overtaken.
  EXPECT_GT(found, all * 2 / 3) << "of " << all;
  Waits circular = waits;
  circular[1].push_back({static_cast<int>(waits.size()) - 1, 0});
  EXPECT_NE(run_streams(schedule, circular, 3, 1, 0).find("never starts"), std::string::npos);
}

// Ranks build their lists for themselves and have to issue the same collectives.
TEST(Waits, CollectivesAreTheSameWhereverTheListIsBuilt) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const RandomCase one = make_random_case(seed), other = make_random_case(seed);
    const Schedule a = build_schedule(one.layout, one.program, one.policy);
    const Schedule b = build_schedule(other.layout, other.program, other.policy);
    ASSERT_EQ(a.operations.size(), b.operations.size());
    for (size_t i = 0; i < a.operations.size(); ++i) {
      ASSERT_EQ(describe(a.operations[i], {}), describe(b.operations[i], {}));
      ASSERT_EQ(communicators_of(a.operations[i], a), communicators_of(b.operations[i], b));
      ASSERT_EQ(is_collective(a.operations[i].kind), !communicators_of(a.operations[i], a).empty());
    }
  }
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

// What the step promises: the first gathers of the next step wait for no update but their own unit's, and for
// the last use of what their slots held. The embedding is updated last and gathered first, so its gather
// waits for all.
TEST(Waits, FirstGathersWaitForTheirOwnUpdateOnly) {
  const Schedule schedule = build_schedule(make_layout(make_units(4), 2), DeclaredProgram(), {});
  const Waits waits = derive_waits(schedule);
  int found = 0;
  for (size_t i = 0; i < waits.size(); ++i) {
    const Operation& operation = schedule.operations[i];
    if (!operation.next_step) continue;
    int updates = 0;
    for (const Wait& wait : waits[i]) {
      const Operation& waited = schedule.operations[static_cast<size_t>(wait.operation)];
      EXPECT_EQ(wait.steps_back, 0);
      if (waited.kind == OpKind::kUpdate) {
        ++updates;
        EXPECT_EQ(waited.unit, operation.unit);
      } else {
        EXPECT_EQ(waited.weight_slot, operation.weight_slot) << describe(waited, {});
      }
    }
    EXPECT_EQ(updates, found++ == 0 ? 1 : 0);
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
            "'gather block0 -> weight slot 0, for the next step' on the gather stream of the step before");
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
  Schedule early = schedule;  // the backward pass touches the shard slot of the reduction before
  early.operations[static_cast<size_t>(find(early, OpKind::kBackward, 5))].writes.push_back(
      {RegionKind::kGradientShard,
       early.operations[static_cast<size_t>(find(early, OpKind::kReduceScatter, 6))].shard_slot});
  EXPECT_FALSE(find_hazards(early, waits).empty());
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
