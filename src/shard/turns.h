// The computations of a step in their order, and which slots hold the weights and gradients of each. Internal
// to the builder.
#pragma once

#include <vector>

#include "shard/builder.h"
#include "shard/layout.h"
#include "shard/schedule.h"

namespace minillm::shard {

/// What a turn leaves of its unit's gradients.
enum class Gradients : uint8_t {
  kNone,
  kBegun,     ///< some; a later turn of the unit makes the others
  kComplete,  ///< all of its segment: they can be reduced
};

/// One operation of the compute stream that works on a unit.
struct Turn {
  OpKind kind{};
  int unit = 0;
  int segment = -1;
  int micro_batch = 0;
  Gradients gradients = Gradients::kNone;
};

/// For each micro-batch forward 0 … head, then, where Policy::split_head says so, the head's input gradient,
/// then backward the unit before the head … 0. In the last one the weight gradients of the deferred blocks
/// follow at the end, by segment, small ones last: what is computed last is what nothing hides the reduction
/// of.
std::vector<Turn> make_turns(const Layout& layout, const Policy& policy);

/// A gather that is possible once turn `after` is done.
struct PlannedGather {
  int unit = 0;
  int slot = 0;
  int after = 0;
};

/// Which slot holds the weights at each turn (-1: none needed), and the gathers that fill them, each list in
/// the order of use. A slot is free from its last use on: those of `next_step` are for the first turns of the
/// step after, which find nothing of this one's, since updates follow.
struct WeightPlan {
  std::vector<Slot> slots;
  std::vector<int> slot_of_turn;
  std::vector<PlannedGather> this_step, next_step;
};
WeightPlan plan_weights(const Layout& layout, const std::vector<Turn>& turns, int slots_for_blocks);

/// Where the gradients of each turn go (-1: it makes none).
struct GradientPlan {
  std::vector<int> slot_of_turn;
  int slots = 0;
};
/// Units take `slots` in turn, both parts of a split head the same; deferred blocks and the embedding after
/// them, which wait for each other, have slots of their own. With `slot_per_unit` the slot of a unit is its
/// number.
GradientPlan plan_gradients(const std::vector<Turn>& turns, int slots, bool slot_per_unit);

}  // namespace minillm::shard
