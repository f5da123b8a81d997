// The builder's schedules on paper, and find_fault against faults planted in them.
#include "slot_replay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "fixtures.h"

namespace minillm::shard {
namespace {

struct Case {
  Layout layout;
  Policy policy;
  Schedule schedule;
};

Case make_case(unsigned seed) {
  RandomCase random = make_random_case(seed);
  Schedule schedule = build_schedule(random.layout, random.program, random.policy);
  return {std::move(random.layout), std::move(random.policy), std::move(schedule)};
}

TEST(SlotReplay, FindsNoFaultInRandomModels) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const Case random = make_case(seed);
    ASSERT_EQ(find_fault(random.schedule, random.layout, random.policy), "") << "seed " << seed;
  }
}

TEST(SlotReplay, FindsNoFaultInModelsOfAllSizes) {
  for (int blocks : {0, 1, 2, 3, 4, 7, 12})
    for (int world : {1, 2, 4})
      for (int slots : {2, 3, 5})
        for (int deferred : {0, 1, 3})
          for (bool clip : {false, true})
            for (bool norm : {false, true}) {
              const auto units = norm ? make_units_with_norm(blocks) : make_segmented_units(blocks);
              const Layout layout = make_layout(units, world);
              const Policy policy{.weight_slots = slots,
                                  .gradient_slots = slots - 1,
                                  .deferred_blocks = deferred,
                                  .split_head = deferred != 1,
                                  .clip = clip};
              EXPECT_EQ(find_fault(build_schedule(layout, DeclaredProgram(), policy), layout, policy), "")
                  << blocks << " blocks, world " << world << ", slots " << slots << ", deferred " << deferred
                  << ", clip " << clip << ", final norm " << norm;
            }
}

class PlantedFaults : public testing::Test {
 protected:
  void SetUp() override {
    for (unsigned seed = 0; seed < 40; ++seed) cases_.push_back(make_case(seed));
  }

  void expect_found(const Case& original, const Schedule& faulty, const std::string& what) {
    ++planted_;
    EXPECT_NE(find_fault(faulty, original.layout, original.policy), "") << what;
  }

  std::vector<Case> cases_;
  int planted_ = 0;
};

TEST_F(PlantedFaults, EveryOperationLeftOutOrDoubledIsFound) {
  std::set<OpKind> kinds;
  for (const Case& original : cases_)
    for (size_t i = 0; i < original.schedule.operations.size(); ++i) {
      const Operation& operation = original.schedule.operations[i];
      kinds.insert(operation.kind);
      Schedule without = original.schedule;
      without.operations.erase(without.operations.begin() + static_cast<std::ptrdiff_t>(i));
      expect_found(original, without, "without " + describe(operation, {}));
      Schedule twice = original.schedule;
      twice.operations.insert(twice.operations.begin() + static_cast<std::ptrdiff_t>(i), operation);
      expect_found(original, twice, "twice " + describe(operation, {}));
    }
  EXPECT_EQ(kinds.size(), 24u) << "of the kinds that the builder makes, some are in no case";
}

// Exchanges each operation with the last one that wrote what it reads.
TEST_F(PlantedFaults, EveryOperationBeforeWhatItNeedsIsFound) {
  for (const Case& original : cases_) {
    std::map<Region, size_t> writer;
    std::set<std::pair<size_t, size_t>> pairs;
    const auto& operations = original.schedule.operations;
    for (size_t i = 0; i < operations.size(); ++i) {
      for (const Region& region : operations[i].reads)
        if (region.kind != RegionKind::kBuffer && writer.contains(region)) pairs.emplace(writer[region], i);
      for (const Region& region : operations[i].writes) writer[region] = i;
    }
    for (const auto& [first, second] : pairs) {
      Schedule exchanged = original.schedule;
      std::swap(exchanged.operations[first], exchanged.operations[second]);
      expect_found(original, exchanged,
                   describe(operations[second], {}) + " before " + describe(operations[first], {}));
    }
  }
  EXPECT_GT(planted_, 2000);
}

TEST_F(PlantedFaults, EveryWrongSlotOrFlagIsFound) {
  for (const Case& original : cases_)
    for (size_t i = 0; i < original.schedule.operations.size(); ++i) {
      const auto change = [&](const char* what, auto member, auto value) {
        Schedule changed = original.schedule;
        if (std::exchange(changed.operations[i].*member, value) == value) return;
        expect_found(original, changed,
                     std::string(what) + " of " + describe(original.schedule.operations[i], {}));
      };
      const Operation& operation = original.schedule.operations[i];
      const auto move = [&](const char* what, int Operation::*slot, const std::vector<Slot>& slots) {
        if (operation.*slot >= 0 && slots.size() > 1)
          change(what, slot, static_cast<int>((operation.*slot + 1) % slots.size()));
      };
      move("weight slot", &Operation::weight_slot, original.schedule.weight_slots);
      move("gradient slot", &Operation::gradient_slot, original.schedule.gradient_slots);
      move("shard slot", &Operation::shard_slot, original.schedule.shard_slots);
      const OpKind kind = operation.kind;
      if ((makes_gradients(kind) && kind != OpKind::kBackwardWeight) || kind == OpKind::kAccumulate)
        change("accumulate", &Operation::accumulate, !operation.accumulate);
      if (kind == OpKind::kGather) change("next step", &Operation::next_step, !operation.next_step);
    }
  EXPECT_GT(planted_, 3000);
}

TEST_F(PlantedFaults, EveryRegionThatIsNotDeclaredIsFound) {
  for (const Case& original : cases_)
    for (size_t i = 0; i < original.schedule.operations.size(); ++i)
      for (auto list : {&Operation::reads, &Operation::writes})
        for (const Region& region : original.schedule.operations[i].*list) {
          if (region.kind == RegionKind::kBuffer) continue;
          Schedule silent = original.schedule;
          std::erase(silent.operations[i].*list, region);
          expect_found(original, silent,
                       describe(region, {}) + " of " + describe(original.schedule.operations[i], {}));
        }
  EXPECT_GT(planted_, 3000);
}

// Of slots that hold the longest of the units that they are made for.
TEST_F(PlantedFaults, SlotsThatAreTooShortAreFound) {
  for (const Case& original : cases_) {
    const Schedule& schedule = original.schedule;
    const auto expect_too_short = [&](auto shorten) {
      Schedule shorter = schedule;
      shorten(shorter);
      expect_found(original, shorter, "a slot that is too short");
    };
    for (const Operation& operation : schedule.operations)
      if (operation.kind == OpKind::kGather && schedule.weight_slots[operation.weight_slot].elements ==
                                                   original.layout.units[operation.unit].padded_elements)
        expect_too_short([&](Schedule& s) { --s.weight_slots[operation.weight_slot].elements; });
    for (size_t i = 0; i < schedule.gradient_slots.size(); ++i)
      expect_too_short([&](Schedule& s) { --s.gradient_slots[i].elements; });
    for (size_t i = 0; i < schedule.shard_slots.size(); ++i)
      expect_too_short([&](Schedule& s) { --s.shard_slots[i].elements; });
    for (auto elements : {&Schedule::wire_elements, &Schedule::reduced_elements})
      if (schedule.*elements > 0) expect_too_short([&](Schedule& s) { --(s.*elements); });
  }
  EXPECT_GT(planted_, 500);
}

}  // namespace
}  // namespace minillm::shard
