// Builds the schedule of a step: a pure function of units, buffers and policy.
#pragma once

#include "shard/layout.h"
#include "shard/program.h"
#include "shard/schedule.h"

namespace minillm::shard {

struct Policy {
  int weight_slots = 2;    ///< for the blocks (slot group 0); embedding and head share one of their own
  int gradient_slots = 2;  ///< likewise
};

/// Full sharding (ZeRO-3). Unit 0 is the embedding, the last the head, the others the blocks in forward
/// order.
///
/// Forward: the gather of a unit is issued as soon as a slot of its group is free, which is right after the
/// last use of the unit that the slot held; the head runs forward and backward at once; blocks still in their
/// slots at the turn are not gathered again; the embedding's backward needs no weights. Backward: the next
/// gather is issued before the reduce-scatter of the unit just finished. Then norm, clip and the updates in
/// forward order of units, so that the next step's first gathers need only the first updates. With world 1
/// there are no gathers, reductions or slots: operations use the shards themselves.
///
/// Throws UsageError naming `parallel.weight_slots` or `parallel.gradient_slots` for counts below 2 or 1.
Schedule build_schedule(const Layout& layout, const Program& program, const Policy& policy);

}  // namespace minillm::shard
