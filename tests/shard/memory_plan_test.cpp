#include "shard/memory_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "core/checked.h"
#include "core/error.h"
#include "fixtures.h"

namespace minillm::shard {
namespace {

void expect_sound(const MemoryPlan& plan) {
  for (size_t a = 0; a < plan.placements.size(); ++a) {
    const Placement& p = plan.placements[a];
    EXPECT_EQ(p.offset % kPlanAlignment, 0) << p.name;
    EXPECT_GE(p.offset, 0) << p.name;
    EXPECT_LE(p.offset + p.bytes, plan.bytes) << p.name;
    EXPECT_LE(p.first, p.last) << p.name;
    for (size_t b = 0; b < a; ++b) {
      const Placement& q = plan.placements[b];
      const bool same_time = std::max(p.first, q.first) <= std::min(p.last, q.last);
      const bool same_place = std::max(p.offset, q.offset) < std::min(p.offset + p.bytes, q.offset + q.bytes);
      EXPECT_FALSE(same_time && same_place) << p.name << " and " << q.name;
    }
  }
}

// What no placement can go below: the most that is live at once, each buffer rounded up to the alignment.
int64_t lower_bound(const MemoryPlan& plan) {
  int64_t bound = 0;
  for (const Placement& at : plan.placements) {
    int64_t live = 0;
    for (const Placement& other : plan.placements)
      if (other.first <= at.first && at.first <= other.last) live += round_up(other.bytes, kPlanAlignment);
    bound = std::max(bound, live);
  }
  return bound;
}

const Placement& find(const MemoryPlan& plan, const std::string& name) {
  const auto found = std::find_if(plan.placements.begin(), plan.placements.end(),
                                  [&](const Placement& placement) { return placement.name == name; });
  if (found == plan.placements.end()) throw std::out_of_range("no placement named " + name);
  return *found;
}

struct Planned {
  Schedule schedule;
  MemoryPlan plan;
};

Planned plan(const Layout& layout, const Program& program, DType type = DType::kBf16, Policy policy = {}) {
  Schedule schedule = build_schedule(layout, program, policy);
  MemoryPlan planned = plan_memory(schedule, layout, program, type);
  return {std::move(schedule), std::move(planned)};
}

TEST(MemoryPlan, RandomModelsNeverOverlap) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    const RandomCase random = make_random_case(seed);
    const Planned planned =
        plan(random.layout, random.program, seed % 2 ? DType::kFp32 : DType::kBf16, random.policy);
    expect_sound(planned.plan);
    EXPECT_GE(planned.plan.bytes, lower_bound(planned.plan));
    ASSERT_EQ(planned.plan.buffer.size(), random.program.specs.size());
    for (size_t i = 0; i < random.program.specs.size(); ++i)
      EXPECT_EQ(planned.plan.buffer[i], find(planned.plan, random.program.specs[i].name).offset);
  }
}

// Sharing is allowed between uses that one stream orders: checked from the schedule, not from the placements.
TEST(MemoryPlan, SharedMemoryStaysOnOneStream) {
  int shared = 0;
  for (unsigned seed = 0; seed < 400; ++seed) {
    const RandomCase random = make_random_case(seed);
    const Planned planned = plan(random.layout, random.program, DType::kBf16, random.policy);
    const auto streams = [&](int buffer) {
      std::set<StreamId> result;
      for (const Operation& operation : planned.schedule.operations)
        for (const auto* regions : {&operation.reads, &operation.writes})
          for (const Region& region : *regions)
            if (region == Region{RegionKind::kBuffer, buffer}) result.insert(operation.stream);
      return result;
    };
    const auto& specs = random.program.specs;
    for (int a = 0; a < static_cast<int>(specs.size()); ++a)
      for (int b = 0; b < a; ++b) {
        const auto at = [&](int i) { return planned.plan.buffer[static_cast<size_t>(i)]; };
        const auto end = [&](int i) { return at(i) + specs[static_cast<size_t>(i)].bytes; };
        if (std::max(at(a), at(b)) >= std::min(end(a), end(b))) continue;
        ++shared;
        std::set<StreamId> both = streams(a);
        both.merge(streams(b));
        EXPECT_EQ(both.size(), 1u) << "seed " << seed << " buffers " << a << " and " << b;
        for (int i : {a, b}) {
          EXPECT_NE(specs[static_cast<size_t>(i)].purpose, Purpose::kInputs);
          EXPECT_NE(specs[static_cast<size_t>(i)].purpose, Purpose::kWorkspace);
        }
      }
  }
  EXPECT_GT(shared, 20);
}

// Activations as a model makes them: written forward, read backward, with scratch in each operation.
DeclaredProgram activation_program(int blocks, std::vector<int64_t> saved, int64_t forward_scratch,
                                   int64_t backward_scratch) {
  DeclaredProgram program;
  const auto add = [&](std::string name, int64_t bytes, Purpose purpose) {
    program.specs.push_back({std::move(name), bytes, purpose});
    return static_cast<int>(program.specs.size()) - 1;
  };
  for (int u = 1; u <= blocks; ++u) {
    BufferUse& forward = program.table[{OpKind::kForward, u}];
    BufferUse& backward = program.table[{OpKind::kBackward, u}];
    const std::string suffix = " " + std::to_string(u);
    for (size_t i = 0; i < saved.size(); ++i) {
      const int buffer = add("saved " + std::to_string(i) + suffix, saved[i], Purpose::kActivations);
      forward.writes.push_back(buffer);
      backward.reads.push_back(buffer);
    }
    forward.writes.push_back(add("forward scratch" + suffix, forward_scratch, Purpose::kScratch));
    backward.writes.push_back(add("backward scratch" + suffix, backward_scratch, Purpose::kScratch));
  }
  return program;
}

TEST(MemoryPlan, ActivationsReachTheLowerBound) {
  for (int blocks : {1, 2, 5, 12})
    for (int64_t scratch : {256, 4096, 100000}) {
      const DeclaredProgram program =
          activation_program(blocks, {1000, 3000, 256, 9999}, scratch, 2 * scratch);
      const Planned planned = plan(make_layout(make_units(blocks), 2), program);
      expect_sound(planned.plan);
      EXPECT_EQ(planned.plan.bytes, lower_bound(planned.plan)) << blocks << " blocks, scratch " << scratch;
    }
}

TEST(MemoryPlan, BuffersOfDifferentTimesShareAPlace) {
  DeclaredProgram program;
  program.specs = {{"first", 1000, Purpose::kScratch}, {"second", 700, Purpose::kScratch}};
  program.table[{OpKind::kForward, 0}].writes = {0};
  program.table[{OpKind::kForward, 1}].writes = {1};
  const MemoryPlan shared = plan(make_layout(make_units(1), 1), program).plan;
  EXPECT_EQ(shared.buffer[0], shared.buffer[1]);
  EXPECT_EQ(shared.bytes, lower_bound(shared));
  EXPECT_EQ(find(shared, "first").first, find(shared, "first").last);

  program.table[{OpKind::kForward, 1}].reads = {0};
  const MemoryPlan apart = plan(make_layout(make_units(1), 1), program).plan;
  EXPECT_NE(apart.buffer[0], apart.buffer[1]);
}

TEST(MemoryPlan, SomeBuffersKeepTheirPlaceForTheWholeRun) {
  DeclaredProgram program;
  program.specs = {{"inputs", 256, Purpose::kInputs},        {"workspace", 256, Purpose::kWorkspace},
                   {"two streams", 256, Purpose::kScratch},  {"unnamed", 256, Purpose::kScratch},
                   {"other stream", 256, Purpose::kScratch}, {"late", 256, Purpose::kScratch}};
  program.table[{OpKind::kBegin, -1}].writes = {0, 1, 2};
  program.table[{OpKind::kSquareNorm, 2}].reads = {2};
  program.table[{OpKind::kSquareNorm, 2}].writes = {4};
  program.table[{OpKind::kReadBack, -1}].writes = {5};
  const Planned planned = plan(make_layout(make_units(1), 1), program);
  const int last = static_cast<int>(planned.schedule.operations.size()) - 1;
  for (const char* name : {"inputs", "workspace", "two streams", "unnamed"}) {
    EXPECT_EQ(find(planned.plan, name).first, 0) << name;
    EXPECT_EQ(find(planned.plan, name).last, last) << name;
  }
  std::set<int64_t> offsets(planned.plan.buffer.begin(), planned.plan.buffer.end());
  EXPECT_EQ(offsets.size(), program.specs.size()) << "none of these may share";
}

TEST(MemoryPlan, ShardsFollowTheWorldAndTheType) {
  const DeclaredProgram none;
  const Layout layout = make_layout(make_units(2, 50), 4);
  const MemoryPlan bf16 = plan(layout, none, DType::kBf16).plan;
  EXPECT_NE(bf16.parameter_shard, bf16.master);
  EXPECT_EQ(find(bf16, "block1 master").bytes, 4 * layout.units[2].shard_elements);
  EXPECT_EQ(find(bf16, "block1 parameter shard").bytes, 2 * layout.units[2].shard_elements);
  EXPECT_EQ(find(bf16, "weight slot 1").bytes, 2 * layout.units[2].padded_elements);
  EXPECT_EQ(find(bf16, "gradient slot 2").bytes,
            4 * std::max(layout.units.front().padded_elements, layout.units.back().padded_elements));
  EXPECT_EQ(find(bf16, "norm partials").bytes, 4 * 4);
  EXPECT_EQ(find(bf16, "weight slot 1").offset, bf16.weight_slot[1]);

  const MemoryPlan fp32 = plan(layout, none, DType::kFp32).plan;
  EXPECT_EQ(fp32.parameter_shard, fp32.master);
  EXPECT_EQ(find(fp32, "weight slot 1").bytes, 4 * layout.units[2].padded_elements);

  const MemoryPlan alone = plan(make_layout(make_units(2, 50), 1), none).plan;
  EXPECT_TRUE(alone.weight_slot.empty());
  EXPECT_TRUE(alone.gradient_slot.empty());
  int64_t persistent = 0;
  for (const UnitLayout& unit : layout.units) persistent += 18 * unit.shard_elements;
  EXPECT_EQ(bf16.weight_slot[0], persistent) << "master, bf16 copy, two moments and gradients: 18 bytes each";
}

TEST(MemoryPlan, TableForPeople) {
  DeclaredProgram program;
  program.specs = {{"saved", 3'000'000, Purpose::kActivations},
                   {"scratch a", 1'000'000, Purpose::kScratch},
                   {"scratch b", 2'000'000, Purpose::kScratch},
                   {"tokens", 500'000, Purpose::kInputs}};
  program.table[{OpKind::kBegin, -1}].writes = {3};
  program.table[{OpKind::kForward, 1}].writes = {0, 1};
  program.table[{OpKind::kBackward, 1}] = {{0}, {2}};
  // 1000 x 1000, 1000 + 1000 x 1000 and 7 x 1000 parameters, of which a rank owns half.
  const Layout layout = make_layout({{"embedding", {{"table", {1000, 1000}}}, 1},
                                     {"block0", {{"norm", {1000}}, {"weight", {1000, 1000}}}, 0},
                                     {"head", {{"weight", {7, 1000}}}, 1}},
                                    2);
  EXPECT_EQ(plan(layout, program).plan.table(), R"(parameters              6.0 MB   16.9 %
moments                 8.0 MB   22.6 %
gradients               4.0 MB   11.3 %
weight slots            4.0 MB   11.2 %
gradient slots          8.0 MB   22.5 %
activations             3.0 MB    8.4 %
scratch                 2.0 MB    5.6 %
inputs                  0.5 MB    1.4 %
workspace               0.0 MB    0.0 %
arena                  35.6 MB  100.0 %, most in use at: backward block0 (weight slot 0) -> gradient slot 0
)");
}

TEST(MemoryPlan, RefusesWhatCannotBePlanned) {
  DeclaredProgram negative;
  negative.specs = {{"negative", -1, Purpose::kScratch}};
  EXPECT_THROW(plan(make_layout(make_units(1), 1), negative), InternalError);
  DeclaredProgram unknown;
  unknown.table[{OpKind::kBegin, -1}].reads = {3};
  EXPECT_THROW(plan(make_layout(make_units(1), 1), unknown), InternalError);
}

}  // namespace
}  // namespace minillm::shard
