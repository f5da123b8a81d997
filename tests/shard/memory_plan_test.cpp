#include "shard/memory_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "core/error.h"
#include "memory_replay.h"
#include "model_program.h"
#include "random_step.h"
#include "shard/builder.h"

namespace minillm::shard {
namespace {

using Waits = std::vector<std::vector<Wait>>;

const Placement* look_up(const MemoryPlan& plan, const std::string& name) {
  const auto found = std::find_if(plan.placements.begin(), plan.placements.end(),
                                  [&](const Placement& placement) { return placement.name == name; });
  return found == plan.placements.end() ? nullptr : &*found;
}

const Placement& find(const MemoryPlan& plan, const std::string& name) {
  if (const Placement* found = look_up(plan, name)) return *found;
  throw std::out_of_range("no placement named " + name);
}

struct Planned {
  Schedule schedule;
  Waits waits;
  MemoryPlan plan;
};

Planned plan(Schedule schedule, const Layout& layout, const Program& program, DType type = DType::kBf16) {
  Waits waits = derive_waits(schedule);
  MemoryPlan planned = plan_memory(schedule, waits, layout, program, type);
  return {std::move(schedule), std::move(waits), std::move(planned)};
}

Planned plan_model(const Layout& layout, const Program& program, DType type = DType::kBf16,
                   const Policy& policy = {}) {
  return plan(build_schedule(layout, program, policy), layout, program, type);
}

std::vector<std::string> faults(const Planned& planned, const Layout& layout, const Program& program,
                                DType type = DType::kBf16) {
  return find_memory_faults(planned.schedule, planned.waits, layout, program.buffers(), type, DType::kFp32,
                            planned.plan);
}

bool overlap(const Placement& a, const Placement& b) {
  return std::max(a.offset, b.offset) < std::min(a.offset + a.bytes, b.offset + b.bytes);
}

// Pairs of pieces that share memory, and how many of them with a life that goes over the end of the step.
struct Sharing {
  int pairs = 0, over_the_end = 0;

  void count(const MemoryPlan& plan) {
    for (size_t a = 0; a < plan.placements.size(); ++a)
      for (size_t b = 0; b < a; ++b) {
        const Placement &p = plan.placements[a], &q = plan.placements[b];
        if (!overlap(p, q)) continue;
        ++pairs;
        over_the_end += p.last < p.first || q.last < q.first;
      }
  }
};

void expect_consistent(const MemoryPlan& plan) {
  EXPECT_LE(plan.live_bytes, plan.bytes);
  for (const Placement& placement : plan.placements) {
    EXPECT_EQ(placement.offset % kPlanAlignment, 0) << placement.name;
    EXPECT_GE(placement.offset, 0) << placement.name;
    EXPECT_LE(placement.offset + placement.bytes, plan.bytes) << placement.name;
  }
}

TEST(MemoryPlan, IsSoundForRandomSteps) {
  Sharing sharing;
  for (unsigned seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    const RandomStep step = make_random_step(seed);
    const DType type = seed % 2 ? DType::kFp32 : DType::kBf16;
    const Planned planned = plan(step.schedule, step.layout, step.program, type);
    expect_consistent(planned.plan);
    ASSERT_EQ(faults(planned, step.layout, step.program, type), std::vector<std::string>{});
    for (size_t i = 0; i < step.program.specs.size(); ++i) {
      const Placement* placed = look_up(planned.plan, step.program.specs[i].name);
      EXPECT_EQ(planned.plan.buffer[i], placed ? placed->offset : -1);
    }
    sharing.count(planned.plan);
  }
  EXPECT_GT(sharing.pairs, 10000);
  EXPECT_GT(sharing.over_the_end, 300);
}

TEST(MemoryPlan, IsSoundForRandomModels) {
  Sharing sharing;
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const RandomCase random = make_random_case(seed);
    const DType type = seed % 2 ? DType::kFp32 : DType::kBf16;
    const Planned planned = plan_model(random.layout, random.program, type, random.policy);
    expect_consistent(planned.plan);
    ASSERT_EQ(faults(planned, random.layout, random.program, type), std::vector<std::string>{});
    sharing.count(planned.plan);
  }
  EXPECT_GT(sharing.pairs, 1000);
  EXPECT_GT(sharing.over_the_end, 100);
}

// --- faults that the replay has to find ------------------------------------------------------------------

int64_t* offset_of(MemoryPlan& plan, const Region& region) {
  const auto index = static_cast<size_t>(region.index);
  switch (region.kind) {
    case RegionKind::kWeightSlot:
      return &plan.weight_slot[index];
    case RegionKind::kGradientSlot:
      return &plan.gradient_slot[index];
    case RegionKind::kGradientShard:
      return &plan.shard_slot[index];
    case RegionKind::kWireSlot:
      return &plan.wire;
    case RegionKind::kReducedPiece:
      return &plan.reduced_piece;
    case RegionKind::kBuffer:
      return &plan.buffer[index];
    default:
      return nullptr;
  }
}

std::vector<Region> regions_of(const Operation& operation) {
  std::vector<Region> regions = operation.reads;
  regions.insert(regions.end(), operation.writes.begin(), operation.writes.end());
  return regions;
}

bool is_empty(const Region& region, const DeclaredProgram& program) {
  return region.kind == RegionKind::kBuffer && program.specs[static_cast<size_t>(region.index)].bytes == 0;
}

TEST(MemoryReplay, FindsPiecesOfOneOperationInOnePlace) {
  int planted = 0;
  for (unsigned seed = 0; seed < 30; ++seed) {
    const RandomStep step = make_random_step(seed);
    const Planned planned = plan(step.schedule, step.layout, step.program);
    for (const Operation& operation : step.schedule.operations)
      for (const Region& a : regions_of(operation))
        for (const Region& b : regions_of(operation)) {
          Planned moved = planned;
          int64_t *to = offset_of(moved.plan, a), *from = offset_of(moved.plan, b);
          if (!to || !from || a == b || is_empty(a, step.program) || is_empty(b, step.program)) continue;
          *to = *from;
          ++planted;
          EXPECT_FALSE(faults(moved, step.layout, step.program).empty()) << "seed " << seed;
        }
  }
  EXPECT_GT(planted, 500);
}

TEST(MemoryReplay, FindsPlacesWithinWhatLivesForTheWholeRun) {
  const RandomStep step = make_random_step(3);
  const Planned planned = plan(step.schedule, step.layout, step.program);
  for (int64_t MemoryPlan::*scalar : {&MemoryPlan::loss_total, &MemoryPlan::clip}) {
    Planned moved = planned;
    moved.plan.*scalar = moved.plan.moment1[1];
    EXPECT_FALSE(faults(moved, step.layout, step.program).empty());
  }
  Planned short_arena = planned;
  short_arena.plan.bytes -= 1 + kPlanAlignment;
  EXPECT_FALSE(faults(short_arena, step.layout, step.program).empty());
  Planned odd = planned;
  odd.plan.clip += 4;
  EXPECT_FALSE(faults(odd, step.layout, step.program).empty());
}

// A piece that is used once more than was planned, within the life of one that has its place.
TEST(MemoryReplay, FindsLivesThatLastLonger) {
  int planted = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    const RandomStep step = make_random_step(seed);
    const auto& specs = step.program.specs;
    const Planned planned = plan(step.schedule, step.layout, step.program);
    for (size_t i = 0; i < step.schedule.operations.size(); ++i)
      for (const Region& theirs : regions_of(step.schedule.operations[i]))
        for (int b = 0; b < static_cast<int>(specs.size()); ++b) {
          if (theirs.kind != RegionKind::kBuffer || theirs.index == b) continue;
          const Placement* p = look_up(planned.plan, specs[static_cast<size_t>(b)].name);
          const Placement* q = look_up(planned.plan, specs[static_cast<size_t>(theirs.index)].name);
          if (!p || !q || !overlap(*p, *q)) continue;
          Planned extended = planned;
          extended.schedule.operations[i].reads.push_back({RegionKind::kBuffer, b});
          extended.waits = derive_waits(extended.schedule);
          ++planted;
          EXPECT_FALSE(faults(extended, step.layout, step.program).empty()) << "seed " << seed;
        }
  }
  EXPECT_GT(planted, 200);
}

// Without a wait the plan is made anew and sound; the old one is not, wherever it relied on the wait.
TEST(MemoryReplay, FindsMissingWaits) {
  int found = 0;
  for (unsigned seed = 0; seed < 80; ++seed) {
    SCOPED_TRACE(seed);
    const RandomStep step = make_random_step(seed);
    Planned planned = plan(step.schedule, step.layout, step.program);
    for (size_t i = 0; i < planned.waits.size(); ++i)
      for (size_t w = 0; w < planned.waits[i].size(); ++w) {
        const std::vector<Wait> all = planned.waits[i];
        planned.waits[i].erase(planned.waits[i].begin() + static_cast<std::ptrdiff_t>(w));
        found += !faults(planned, step.layout, step.program).empty();
        Planned anew = planned;
        anew.plan = plan_memory(anew.schedule, anew.waits, step.layout, step.program, DType::kBf16);
        ASSERT_EQ(faults(anew, step.layout, step.program), std::vector<std::string>{});
        planned.waits[i] = all;
      }
  }
  EXPECT_GT(found, 100);
}

// --- what is shared and what is not ----------------------------------------------------------------------

TEST(MemoryPlan, BuffersOfDifferentTimesShareAPlace) {
  DeclaredProgram program;
  program.specs = {{"first", 1000, Purpose::kScratch}, {"second", 700, Purpose::kScratch}};
  program.table[{OpKind::kForward, 0}].writes = {0};
  program.table[{OpKind::kForward, 1}].writes = {1};
  const MemoryPlan shared = plan_model(make_layout(make_units(1), 1), program).plan;
  EXPECT_EQ(shared.buffer[0], shared.buffer[1]);
  EXPECT_EQ(find(shared, "first").first, find(shared, "first").last);

  program.table[{OpKind::kForward, 1}].reads = {0};
  const MemoryPlan apart = plan_model(make_layout(make_units(1), 1), program).plan;
  EXPECT_NE(apart.buffer[0], apart.buffer[1]);
}

Operation on(StreamId stream, std::vector<Region> reads, std::vector<Region> writes) {
  Operation operation{.kind = OpKind::kForward, .stream = stream};
  operation.reads = std::move(reads);
  operation.writes = std::move(writes);
  return operation;
}
constexpr Region kSlot{RegionKind::kWeightSlot, 0};
constexpr Region buffer(int index) {
  return {RegionKind::kBuffer, index};
}

// A slot that is filled at the end of a step for the next one lends its place in between, not before.
TEST(MemoryPlan, WeightsGatheredForTheNextStepAreKeptOverItsEnd) {
  DeclaredProgram program;
  program.specs = {{"early", 100, Purpose::kScratch},
                   {"middle", 100, Purpose::kScratch},
                   {"late", 100, Purpose::kScratch}};
  Schedule schedule;
  schedule.weight_slots = {{0, 1000}};
  schedule.operations = {on(StreamId::kCompute, {}, {buffer(0)}), on(StreamId::kCompute, {kSlot}, {}),
                         on(StreamId::kCompute, {}, {buffer(1)}), on(StreamId::kCompute, {}, {kSlot}),
                         on(StreamId::kCompute, {}, {buffer(2)})};
  schedule.operations[3].next_step = true;
  const Layout layout = make_layout(make_units(1), 2);
  const MemoryPlan planned = plan(schedule, layout, program).plan;
  const Placement& slot = find(planned, "weight slot 0");
  EXPECT_EQ(slot.first, 3);
  EXPECT_EQ(slot.last, 1);
  EXPECT_TRUE(overlap(slot, find(planned, "middle")));
  EXPECT_FALSE(overlap(slot, find(planned, "early")));
  EXPECT_FALSE(overlap(slot, find(planned, "late")));
  EXPECT_EQ(planned.peak_bytes(Purpose::kWeightSlots), 2000);
  EXPECT_EQ(planned.peak_bytes(Purpose::kScratch), 100);

  // The same operation for this step: an ordinary life from the second to the fourth.
  schedule.operations[3].next_step = false;
  const MemoryPlan inside = plan(schedule, layout, program).plan;
  EXPECT_FALSE(overlap(find(inside, "weight slot 0"), find(inside, "middle")));
  EXPECT_TRUE(overlap(find(inside, "weight slot 0"), find(inside, "early")));
}

TEST(MemoryPlan, StreamsShareWhereWaitsOrderThem) {
  DeclaredProgram program;
  program.specs = {{"ours", 1000, Purpose::kScratch}, {"theirs", 1000, Purpose::kScratch}};
  const Region shard{RegionKind::kParameterShard, 0};
  Schedule schedule;
  schedule.operations = {on(StreamId::kCompute, {}, {buffer(0), shard}),
                         on(StreamId::kReduce, {shard}, {buffer(1)})};
  const Layout layout = make_layout(make_units(1), 2);
  const Planned ordered = plan(schedule, layout, program);
  EXPECT_EQ(ordered.plan.buffer[0], ordered.plan.buffer[1]);
  EXPECT_EQ(faults(ordered, layout, program), std::vector<std::string>{});
  for (Operation& operation : schedule.operations) std::erase(operation.reads, shard);
  const Planned unordered = plan(schedule, layout, program);
  EXPECT_NE(unordered.plan.buffer[0], unordered.plan.buffer[1]);
}

TEST(MemoryPlan, InputsAndWorkspacesKeepTheirPlaceAndUnnamedBuffersHaveNone) {
  DeclaredProgram program;
  program.specs = {{"inputs", 256, Purpose::kInputs},
                   {"workspace", 256, Purpose::kWorkspace},
                   {"unnamed", 256, Purpose::kScratch},
                   {"unnamed workspace", 256, Purpose::kWorkspace},
                   {"begun", 256, Purpose::kScratch}};
  program.table[{OpKind::kBegin, -1}].writes = {0, 1};
  program.table[{OpKind::kReadBack, -1}].writes = {4};
  const Planned planned = plan_model(make_layout(make_units(1), 1), program);
  const int last = static_cast<int>(planned.schedule.operations.size()) - 1;
  for (const char* name : {"inputs", "workspace", "unnamed workspace"}) {
    EXPECT_EQ(find(planned.plan, name).first, 0) << name;
    EXPECT_EQ(find(planned.plan, name).last, last) << name;
    for (const Placement& other : planned.plan.placements)
      EXPECT_TRUE(other.name == name || !overlap(other, find(planned.plan, name))) << other.name;
  }
  EXPECT_GE(planned.plan.buffer[3], 0);
  EXPECT_EQ(planned.plan.buffer[2], -1);
  EXPECT_EQ(look_up(planned.plan, "unnamed"), nullptr);
}

TEST(MemoryPlan, SlotsWithoutOperationsHaveNoPlace) {
  Schedule schedule;
  schedule.weight_slots = {{0, 100}};
  schedule.gradient_slots = {{0, 100}};
  schedule.shard_slots = {{0, 100}};
  schedule.wire_elements = schedule.reduced_elements = 100;
  const MemoryPlan planned = plan(schedule, make_layout(make_units(1), 2), DeclaredProgram()).plan;
  EXPECT_EQ(planned.weight_slot, std::vector<int64_t>{-1});
  EXPECT_EQ(planned.gradient_slot, std::vector<int64_t>{-1});
  EXPECT_EQ(planned.shard_slot, std::vector<int64_t>{-1});
  EXPECT_EQ(planned.wire, -1);
  EXPECT_EQ(planned.reduced_piece, -1);
  EXPECT_EQ(planned.bytes, planned.live_bytes);
  EXPECT_EQ(planned.peak_operation, "");
}

TEST(MemoryPlan, SizesFollowTheWorldAndTheTypes) {
  const DeclaredProgram none;
  const Layout layout = make_layout(make_units(2, 50), 4);
  Policy policy;
  policy.micro_batches = 3;
  policy.reduce_type = DType::kBf16;
  const MemoryPlan bf16 = plan_model(layout, none, DType::kBf16, policy).plan;
  EXPECT_EQ(find(bf16, "block1 parameter shard").bytes, 2 * layout.units[2].shard_elements);
  EXPECT_EQ(find(bf16, "block1 lower halves").bytes, 2 * layout.units[2].shard_elements);
  EXPECT_EQ(find(bf16, "block1 lower halves").offset, bf16.lower_half[2]);
  EXPECT_EQ(find(bf16, "weight slot 1").bytes, 2 * layout.units[2].padded_elements);
  EXPECT_EQ(find(bf16, "weight slot 1").offset, bf16.weight_slot[1]);
  EXPECT_EQ(find(bf16, "loss sums").bytes, 3 * 4);
  EXPECT_EQ(find(bf16, "norm partials").bytes, 4 * 4);
  int64_t longest = 0, longest_shard = 0;
  for (const UnitLayout& unit : layout.units) {
    longest = std::max(longest, unit.padded_elements);
    longest_shard = std::max(longest_shard, unit.shard_elements);
  }
  EXPECT_EQ(find(bf16, "wire slot").bytes, 2 * longest);
  EXPECT_EQ(find(bf16, "wire slot").purpose, Purpose::kGradientSlots);
  EXPECT_EQ(find(bf16, "reduced piece").bytes, 2 * longest_shard);
  EXPECT_EQ(find(bf16, "reduced piece").purpose, Purpose::kGradients);
  EXPECT_EQ(find(bf16, "shard slot 0").purpose, Purpose::kGradients);

  const MemoryPlan fp32 = plan_model(layout, none, DType::kFp32).plan;
  EXPECT_EQ(find(fp32, "block1 parameter shard").bytes, 4 * layout.units[2].shard_elements);
  EXPECT_EQ(fp32.lower_half, std::vector<int64_t>(layout.units.size(), -1));
  EXPECT_EQ(find(fp32, "weight slot 1").bytes, 4 * layout.units[2].padded_elements);
  EXPECT_EQ(fp32.wire, -1);

  const Schedule schedule = build_schedule(layout, none, {});
  const MemoryPlan small_moments =
      plan_memory(schedule, derive_waits(schedule), layout, none, DType::kBf16, DType::kBf16);
  for (const auto& [plan, element_bytes] : {std::pair{small_moments, 2}, {bf16, 4}})
    for (size_t u = 0; u < layout.units.size(); ++u)
      EXPECT_EQ(plan.moment2[u], plan.moment1[u] + element_bytes * layout.units[u].shard_elements)
          << "behind";
}

// --- how good it is --------------------------------------------------------------------------------------

struct NamedPolicy {
  const char* name;
  Policy policy;
};

std::vector<NamedPolicy> policies(size_t units) {
  std::vector<NamedPolicy> list = {{"default", {}}};
  const auto add = [&](const char* name) -> Policy& {
    return list.emplace_back(NamedPolicy{name, {}}).policy;
  };
  add("clip").clip = true;
  add("bf16 on the wire").reduce_type = DType::kBf16;
  add("micro-batches").micro_batches = 4;
  add("deferred").deferred_blocks = 4;
  add("keep gradients").keep_gradients = true;
  add("replicas").replicas = 2;
  add("split head").split_head = true;
  add("recompute").recompute = std::vector<bool>(units, true);
  list.back().policy.recompute.front() = list.back().policy.recompute.back() = false;
  Policy& slots = add("more slots");
  slots.weight_slots = slots.gradient_slots = 4;
  return list;
}

TEST(MemoryPlan, LosesNextToNothingOnRealModels) {
  ModelShape shape;
  for (int world : {1, 2, 8}) {
    const Layout layout = make_layout(model_units(shape), world);
    const ModelProgram program(shape);
    for (const auto& [name, policy] : policies(layout.units.size())) {
      SCOPED_TRACE(std::string(name) + ", world " + std::to_string(world));
      const Planned planned = plan_model(layout, program, DType::kBf16, policy);
      EXPECT_EQ(faults(planned, layout, program), std::vector<std::string>{});
      const double loss =
          static_cast<double>(planned.plan.bytes) / static_cast<double>(planned.plan.live_bytes);
      // Of the orders that the plan tries some are 4 % above; the local search brings all of these below 2.
      EXPECT_LE(loss, 1.02);
      if (name == std::string("default")) {
        EXPECT_EQ(planned.plan.bytes, planned.plan.live_bytes);
      }
    }
  }
}

// The head's logits are gone when the blocks' gradients come, and activations when the embedding's do: what
// the purposes need at their own peaks does not have to be there at once.
TEST(MemoryPlan, PurposesTakeEachOthersPlace) {
  ModelShape shape;
  const Layout layout = make_layout(model_units(shape), 2);
  const MemoryPlan planned = plan_model(layout, ModelProgram(shape)).plan;
  int64_t apart = 0;
  for (Purpose purpose : {Purpose::kParameters, Purpose::kMoments, Purpose::kGradients, Purpose::kWeightSlots,
                          Purpose::kGradientSlots, Purpose::kActivations, Purpose::kScratch, Purpose::kInputs,
                          Purpose::kWorkspace})
    apart += planned.peak_bytes(purpose);
  EXPECT_LT(planned.bytes, apart - planned.peak_bytes(Purpose::kScratch) / 10 * 9);
}

TEST(MemoryPlan, IsTheSameForTheSameStepUnderOtherNames) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    RandomStep step = make_random_step(seed);
    const Planned first = plan(step.schedule, step.layout, step.program);
    for (Operation& operation : step.schedule.operations) {
      operation.kind = OpKind::kUpdate;
      operation.unit = -1;
    }
    const Planned second = plan(step.schedule, step.layout, step.program);
    EXPECT_EQ(first.plan.bytes, second.plan.bytes);
    EXPECT_EQ(first.plan.buffer, second.plan.buffer);
    EXPECT_EQ(first.plan.gradient_slot, second.plan.gradient_slot);
  }
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
  EXPECT_EQ(plan_model(layout, program).plan.table(), R"(parameters              4.0 MB   13.6 %
moments                 8.0 MB   27.2 %
gradients               4.0 MB   13.5 %
weight slots            4.0 MB   13.5 %
gradient slots          8.0 MB   27.1 %
activations             3.0 MB   10.1 %
scratch                 2.0 MB    6.8 %
inputs                  0.5 MB    1.7 %
workspace               0.0 MB    0.0 %
arena                  29.6 MB  100.0 %, most in use at: backward block0 (weight slot 0) -> gradient slot 1
)");
}

TEST(MemoryPlan, RefusesWhatCannotBePlanned) {
  const Layout layout = make_layout(make_units(1), 1);
  DeclaredProgram negative;
  negative.specs = {{"negative", -1, Purpose::kScratch}};
  EXPECT_THROW(plan_model(layout, negative), InternalError);
  const DeclaredProgram none;
  const auto named = [](const Region& region) {
    Schedule schedule;
    schedule.operations = {on(StreamId::kCompute, {region}, {})};
    return schedule;
  };
  for (RegionKind kind : {RegionKind::kWeightSlot, RegionKind::kGradientSlot, RegionKind::kGradientShard,
                          RegionKind::kWireSlot, RegionKind::kReducedPiece, RegionKind::kBuffer})
    for (int index : {-1, 0, 3}) EXPECT_THROW(plan(named({kind, index}), layout, none), InternalError);
  EXPECT_THROW(plan_memory(named({RegionKind::kGate}), {}, layout, none, DType::kBf16), InternalError);
  EXPECT_THROW(plan_memory(named({RegionKind::kGate}), {{{0, 0}}}, layout, none, DType::kBf16),
               InternalError);
}

}  // namespace
}  // namespace minillm::shard
