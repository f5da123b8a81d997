#include "shard/turns.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

namespace minillm::shard {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

bool needs_weights(const Turn& turn) {
  return turn.unit > 0 || turn.kind == OpKind::kForward;
}

// The loss with the gradients of the head's last segment, then the gradient of its input with the others'.
void split_head(const UnitLayout& head, int unit, int micro_batch, std::vector<Turn>& turns) {
  const int last = static_cast<int>(head.segments.size()) - 1;
  turns.push_back({OpKind::kHeadLoss, unit, last, micro_batch, Gradients::kComplete});
  turns.push_back({OpKind::kBackwardInput, unit, last - 1, micro_batch,
                   last > 0 ? Gradients::kComplete : Gradients::kNone});
}

std::vector<int> segments_by_size(const UnitLayout& unit) {
  std::vector<int> order(unit.segments.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return unit.segments[static_cast<size_t>(a)].padded_elements >
           unit.segments[static_cast<size_t>(b)].padded_elements;
  });
  return order;
}

std::vector<Slot> make_weight_slots(const Layout& layout, int slots_for_blocks) {
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
    slots.insert(slots.end(), static_cast<size_t>(count), Slot{id, group.elements});
  }
  return slots;
}

// By turn, the next one that needs the weights of the same unit.
std::vector<int> next_uses(const std::vector<Turn>& turns) {
  std::vector<int> next(turns.size(), kNever);
  std::map<int, int> seen;
  for (int turn = static_cast<int>(turns.size()) - 1; turn >= 0; --turn) {
    if (!needs_weights(turns[turn])) continue;
    const auto [found, first] = seen.try_emplace(turns[turn].unit, kNever);
    next[turn] = found->second;
    found->second = turn;
  }
  return next;
}

// Where a slot's content is never used again all such slots are alike but for the time since they are free.
struct Resident {
  int unit = -1;
  int last_use = -1;
  int next_use = kNever;
};

int choose_slot(const std::vector<Slot>& slots, const std::vector<Resident>& residents, int unit, int group) {
  int chosen = -1;
  const auto eviction_order = [&](int s) { return std::pair(residents[s].next_use, -residents[s].last_use); };
  for (int slot = 0; slot < static_cast<int>(slots.size()); ++slot) {
    if (slots[slot].group != group) continue;
    if (residents[slot].unit == unit) return slot;
    if (chosen < 0 || eviction_order(slot) > eviction_order(chosen)) chosen = slot;
  }
  return chosen;
}

}  // namespace

std::vector<Turn> make_turns(const Layout& layout, const Policy& policy) {
  const int head = static_cast<int>(layout.units.size()) - 1;
  const auto recomputes = [&](int unit) { return !policy.recompute.empty() && policy.recompute[unit]; };
  std::vector<Turn> turns;
  for (int m = 0; m < policy.micro_batches; ++m) {
    const int deferred = m + 1 == policy.micro_batches ? std::min(policy.deferred_blocks, head - 1) : 0;
    for (int unit = 0; unit < head; ++unit) turns.push_back({OpKind::kForward, unit, -1, m});
    if (policy.split_head)
      split_head(layout.units[head], head, m, turns);
    else
      turns.push_back({OpKind::kHeadLoss, head, -1, m, Gradients::kComplete});
    for (int unit = head - 1; unit >= 0; --unit) {
      if (recomputes(unit)) turns.push_back({OpKind::kRecompute, unit, -1, m});
      const bool split = unit > 0 && unit <= deferred;
      if (split)
        turns.push_back({OpKind::kBackwardInput, unit, -1, m, Gradients::kBegun});
      else
        turns.push_back({OpKind::kBackward, unit, -1, m, Gradients::kComplete});
    }
    for (int unit = 1; unit <= deferred; ++unit)
      for (int segment : segments_by_size(layout.units[unit]))
        turns.push_back({OpKind::kBackwardWeight, unit, segment, m, Gradients::kComplete});
  }
  return turns;
}

WeightPlan plan_weights(const Layout& layout, const std::vector<Turn>& turns, int slots_for_blocks) {
  WeightPlan plan;
  plan.slots = make_weight_slots(layout, slots_for_blocks);
  plan.slot_of_turn.assign(turns.size(), -1);
  const std::vector<int> next = next_uses(turns);
  std::vector<Resident> residents(plan.slots.size());
  for (int turn = 0; turn < static_cast<int>(turns.size()); ++turn) {
    if (!needs_weights(turns[turn])) continue;
    const int unit = turns[turn].unit;
    const int slot = choose_slot(plan.slots, residents, unit, layout.units[unit].slot_group);
    if (residents[slot].unit != unit)
      (residents[slot].last_use < 0 ? plan.next_step : plan.this_step)
          .push_back({unit, slot, residents[slot].last_use});
    residents[slot] = {unit, turn, next[turn]};
    plan.slot_of_turn[turn] = slot;
  }
  for (PlannedGather& gather : plan.next_step) gather.after = residents[gather.slot].last_use;
  return plan;
}

GradientPlan plan_gradients(const std::vector<Turn>& turns, int slots, bool slot_per_unit) {
  const bool defers = turns.back().kind == OpKind::kBackwardWeight;
  const auto takes_turns = [&](const Turn& turn) {
    const bool last_embedding = turn.unit == 0 && turn.micro_batch == turns.back().micro_batch;
    return turn.kind == OpKind::kHeadLoss || (turn.kind == OpKind::kBackward && !(defers && last_embedding));
  };
  const int shared =
      std::min(slots, static_cast<int>(std::count_if(turns.begin(), turns.end(), takes_turns)));
  GradientPlan plan;
  int taken = 0;
  std::map<int, int> own;  // slots of deferred units, and of the embedding among them
  for (const Turn& turn : turns) {
    int slot = -1;
    if (turn.gradients != Gradients::kNone) {
      if (slot_per_unit)
        slot = turn.unit;
      else if (takes_turns(turn))
        slot = taken++ % shared;
      else if (turn.kind == OpKind::kBackwardInput && turn.gradients == Gradients::kComplete)
        slot = plan.slot_of_turn.back();  // of the head's loss
      else
        slot = own.try_emplace(turn.unit, shared + static_cast<int>(own.size())).first->second;
    }
    plan.slot_of_turn.push_back(slot);
    plan.slots = std::max(plan.slots, slot + 1);
  }
  return plan;
}

}  // namespace minillm::shard
