#include "shard/builder.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "core/error.h"

namespace minillm::shard {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();
constexpr int kStepStart = -1;

// The computation of a step as turns: units forward (0 … head), then backward (the unit before the head … 0).
// All but the last turn, the embedding's backward pass, need weights.
struct Turns {
  int units = 0;

  int count() const { return 2 * units - 1; }
  int unit(int turn) const { return turn < units ? turn : 2 * units - 2 - turn; }
  bool needs_weights(int turn) const { return turn < 2 * units - 2; }
  // Asked of units that ran forward already.
  int next_use(int unit, int turn) const {
    const int backward = 2 * units - 2 - unit;
    return unit > 0 && backward > turn ? backward : kNever;
  }
};

struct PlannedGather {
  int unit = 0;
  int slot = 0;
};

// Which slot holds the weights at each turn, and the gathers that become possible after each turn.
struct WeightPlan {
  std::vector<int> slot_of_turn;
  std::map<int, std::vector<PlannedGather>> gathers_after;  // by turn, or kStepStart
};

// What a slot holds. Contents from before the step are stale, so all slots start free, and a free slot is one
// whose content is never used again and was used last before the step.
struct Resident {
  int unit = -1;
  int last_use = kStepStart;
  int next_use = kNever;
};

WeightPlan plan_weights(const Layout& layout, const std::vector<Slot>& slots, Turns turns) {
  WeightPlan plan;
  std::vector<Resident> residents(slots.size());
  for (int turn = 0; turns.needs_weights(turn); ++turn) {
    const int unit = turns.unit(turn);
    const int group = layout.units[unit].slot_group;
    int chosen = -1;
    for (int slot = 0; slot < static_cast<int>(slots.size()); ++slot) {
      if (slots[slot].group != group) continue;
      if (residents[slot].unit == unit) {
        chosen = slot;
        break;
      }
      const auto eviction_order = [&](int s) {
        return std::pair(residents[s].next_use, -residents[s].last_use);
      };
      if (chosen < 0 || eviction_order(slot) > eviction_order(chosen)) chosen = slot;
    }
    if (residents[chosen].unit != unit)
      plan.gathers_after[residents[chosen].last_use].push_back({unit, chosen});
    residents[chosen] = {unit, turn, turns.next_use(unit, turn)};
    plan.slot_of_turn.push_back(chosen);
  }
  return plan;
}

std::vector<Slot> make_slots(const Layout& layout, int slots_for_blocks) {
  struct Group {
    int units = 0;
    int64_t elements = 0;
  };
  std::map<int, Group> groups;
  for (const UnitLayout& unit : layout.units) {
    Group& group = groups[unit.slot_group];
    ++group.units;
    group.elements = std::max(group.elements, unit.padded_elements);
  }
  std::vector<Slot> slots;
  for (const auto& [id, group] : groups) {
    const int count = std::min(id == 0 ? slots_for_blocks : 1, group.units);
    slots.insert(slots.end(), count, Slot{id, group.elements});
  }
  return slots;
}

void check_policy(const char* key, int found, int least, const char* reason) {
  if (found >= least) return;
  throw UsageError("parallel." + std::string(key) + " is " + std::to_string(found) + "; it must be " +
                   std::to_string(least) + " or more, because " + reason + ". Use 2, the default.");
}

class Builder {
 public:
  Builder(const Layout& layout, const Program& program, const Policy& policy)
      : layout_(layout), program_(program), units_(static_cast<int>(layout.units.size())) {
    schedule_.world = layout.world;
    if (sharded()) {
      schedule_.weight_slots = make_slots(layout, policy.weight_slots);
      schedule_.gradient_slots = make_slots(layout, policy.gradient_slots);
      weights_ = plan_weights(layout, schedule_.weight_slots, Turns{units_});
    }
  }

  Schedule build() && {
    begin();
    compute_gradients();
    reduce_stats();
    update();
    return std::move(schedule_);
  }

 private:
  bool sharded() const { return layout_.world > 1; }

  Operation operation(OpKind kind, int unit, StreamId stream) const {
    return {.kind = kind, .unit = unit, .stream = stream, .reads = {}, .writes = {}};
  }

  void add_collective(Operation operation) { schedule_.operations.push_back(std::move(operation)); }

  void add_compute(Operation operation) {
    const BufferUse use = program_.uses(operation.kind, operation.unit);
    for (int buffer : use.reads) operation.reads.push_back({RegionKind::kBuffer, buffer});
    for (int buffer : use.writes) operation.writes.push_back({RegionKind::kBuffer, buffer});
    schedule_.operations.push_back(std::move(operation));
  }

  void begin() {
    Operation begin = operation(OpKind::kBegin, -1, StreamId::kCompute);
    begin.writes = {{RegionKind::kValidCount}};
    add_compute(std::move(begin));
    if (!sharded()) return;
    Operation sum = operation(OpKind::kAllReduceCount, -1, StreamId::kReduce);
    sum.reads = sum.writes = {{RegionKind::kValidCount}};
    add_collective(std::move(sum));
  }

  void compute_gradients() {
    const Turns turns{units_};
    add_gathers_after(kStepStart);
    for (int turn = 0; turn < turns.count(); ++turn) {
      const int unit = turns.unit(turn);
      const bool makes_gradients = turn >= units_ - 1;
      const OpKind kind = turn < units_ - 1    ? OpKind::kForward
                          : turn == units_ - 1 ? OpKind::kHeadLoss
                                               : OpKind::kBackward;
      Operation compute = operation(kind, unit, StreamId::kCompute);
      if (turns.needs_weights(turn)) use_weights(compute, turn);
      if (makes_gradients) make_gradients(compute);
      if (kind == OpKind::kHeadLoss) {
        compute.reads.push_back({RegionKind::kValidCount});
        compute.writes.push_back({RegionKind::kLossSum});
      }
      const int gradient_slot = compute.gradient_slot;
      add_compute(std::move(compute));
      add_gathers_after(turn);
      if (makes_gradients) reduce_gradients(unit, gradient_slot);
    }
  }

  void use_weights(Operation& compute, int turn) {
    if (sharded()) {
      compute.weight_slot = weights_.slot_of_turn[turn];
      compute.reads.push_back({RegionKind::kWeightSlot, compute.weight_slot});
    } else {
      compute.reads.push_back({RegionKind::kParameterShard, compute.unit});
    }
  }

  void make_gradients(Operation& compute) {
    if (sharded()) {
      compute.gradient_slot = next_gradient_slot(layout_.units[compute.unit].slot_group);
      compute.writes.push_back({RegionKind::kGradientSlot, compute.gradient_slot});
    } else {
      compute.writes.push_back({RegionKind::kGradientShard, compute.unit});
    }
  }

  int next_gradient_slot(int group) {
    std::vector<int> slots;
    for (int slot = 0; slot < static_cast<int>(schedule_.gradient_slots.size()); ++slot)
      if (schedule_.gradient_slots[slot].group == group) slots.push_back(slot);
    return slots[gradients_made_[group]++ % slots.size()];
  }

  void add_gathers_after(int turn) {
    for (const PlannedGather& planned : weights_.gathers_after[turn]) {
      Operation gather = operation(OpKind::kGather, planned.unit, StreamId::kGather);
      gather.weight_slot = planned.slot;
      gather.reads = {{RegionKind::kParameterShard, planned.unit}};
      gather.writes = {{RegionKind::kWeightSlot, planned.slot}};
      add_collective(std::move(gather));
    }
  }

  void reduce_gradients(int unit, int gradient_slot) {
    if (sharded()) {
      Operation reduce = operation(OpKind::kReduceScatter, unit, StreamId::kReduce);
      reduce.gradient_slot = gradient_slot;
      reduce.reads = {{RegionKind::kGradientSlot, gradient_slot}};
      reduce.writes = {{RegionKind::kGradientShard, unit}};
      add_collective(std::move(reduce));
    }
    Operation norm = operation(OpKind::kSquareNorm, unit, StreamId::kReduce);
    norm.reads = {{RegionKind::kGradientShard, unit}};
    norm.writes = {{RegionKind::kNormPartial, unit}};
    add_compute(std::move(norm));
  }

  void reduce_stats() {
    Operation collect = operation(OpKind::kCollectStats, -1, StreamId::kReduce);
    collect.reads = {{RegionKind::kLossSum}};
    for (int unit = 0; unit < units_; ++unit) collect.reads.push_back({RegionKind::kNormPartial, unit});
    collect.writes = {{RegionKind::kStats}};
    add_compute(std::move(collect));
    if (!sharded()) return;
    Operation sum = operation(OpKind::kAllReduceStats, -1, StreamId::kReduce);
    sum.reads = sum.writes = {{RegionKind::kStats}};
    add_collective(std::move(sum));
  }

  void update() {
    Operation clip = operation(OpKind::kClip, -1, StreamId::kCompute);
    clip.reads = {{RegionKind::kStats}};
    clip.writes = {{RegionKind::kClip}};
    add_compute(std::move(clip));
    for (int unit = 0; unit < units_; ++unit) {
      Operation update = operation(OpKind::kUpdate, unit, StreamId::kCompute);
      update.reads = {
          {RegionKind::kGradientShard, unit}, {RegionKind::kClip}, {RegionKind::kOptimizerShard, unit}};
      update.writes = {{RegionKind::kOptimizerShard, unit}, {RegionKind::kParameterShard, unit}};
      add_compute(std::move(update));
    }
    Operation read_back = operation(OpKind::kReadBack, -1, StreamId::kCompute);
    read_back.reads = {{RegionKind::kStats}, {RegionKind::kClip}, {RegionKind::kValidCount}};
    add_compute(std::move(read_back));
  }

  const Layout& layout_;
  const Program& program_;
  int units_ = 0;
  Schedule schedule_;
  WeightPlan weights_;
  std::map<int, size_t> gradients_made_;  // by group
};

}  // namespace

Schedule build_schedule(const Layout& layout, const Program& program, const Policy& policy) {
  check_policy("weight_slots", policy.weight_slots, 2, "one block is gathered while another computes");
  check_policy("gradient_slots", policy.gradient_slots, 1, "gradients need a place before they are reduced");
  if (layout.units.size() < 2)
    throw InternalError("build_schedule: " + std::to_string(layout.units.size()) +
                        " units; at least an embedding and a head are needed");
  return Builder(layout, program, policy).build();
}

}  // namespace minillm::shard
