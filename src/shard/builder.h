// Builds the schedule of a step: a pure function of units, buffers and policy.
#pragma once

#include <vector>

#include "core/dtype.h"
#include "shard/layout.h"
#include "shard/program.h"
#include "shard/schedule.h"

namespace minillm::shard {

/// How a step is ordered. Which ranks share a model is not here but in the layout: its world is the number of
/// ranks that share one. All of them is full sharding (ZeRO-3), one is replication (DDP), between lies hybrid
/// sharding. Keeping weights from forward to backward (ZeRO-2) is full sharding with a weight slot per block.
struct Policy {
  int replicas = 1;        ///< copies of the model
  int weight_slots = 2;    ///< for the blocks (slot group 0); embedding and head share one of their own
  int gradient_slots = 2;  ///< units whose full gradients exist at a time while blocks run backward
  /// Blocks, from the first, whose weight gradients are computed after all input gradients, so that the
  /// reduction, update and next gather of the embedding hide behind them. Each has a gradient slot of its own
  /// and its gradients are reduced segment by segment. At most as many as there are blocks.
  int deferred_blocks = 0;
  /// The head's gradient of its input is an operation of its own. It follows the loss and the gradients of
  /// the head's last segment, which are on their way meanwhile; those of the segment before, if there is one,
  /// come with it. Of heads with one or two segments.
  bool split_head = false;
  int micro_batches = 1;
  /// Gradients of each micro-batch are reduced and added to the shard; false: unreduced gradients are kept in
  /// a slot per unit and reduced after the last one.
  bool reduce_every_micro_batch = true;
  bool clip = false;                 ///< updates wait for the gradient norm
  bool keep_gradients = false;       ///< gradient shards last until the next step, for those who read them
  DType reduce_type = DType::kFp32;  ///< of gradients within the ranks that share a model
  std::vector<bool> recompute = {};  ///< by unit: activations are made again before the backward pass
};

/// Unit 0 is the embedding, the last the head, the others the blocks in forward order.
///
/// Forward: the gather of a unit is issued as soon as a slot of its group is free, which is right after the
/// last use of the unit that the slot held; the head runs forward and backward at once (Policy::split_head:
/// its gradients are reduced in between); blocks still in their slots at the turn are not gathered again; the
/// embedding's backward needs no weights. Backward: the next gather is issued before the reduction of the
/// unit just finished; weight gradients of the first blocks come last (Policy::deferred_blocks). A unit is
/// updated as soon as its gradients are reduced, on a stream of its own; with clipping, all after the norm in
/// forward order. The first gathers of the next step (Operation::next_step) are issued in the order of their
/// use, each as soon as its unit is updated and a slot is free. Without sharding there are no gathers and no
/// weight slots: passes use the shards themselves, and updates follow the last pass that reads what they
/// write.
///
/// Throws UsageError naming `parallel.weight_slots` or `parallel.gradient_slots` for counts below 2 or 1.
Schedule build_schedule(const Layout& layout, const Program& program, const Policy& policy);

}  // namespace minillm::shard
