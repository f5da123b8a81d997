// PyTorch's FSDP2 as a plan: the order, streams, waits, copies and tensors of `fully_shard` on every block
// and on the root, so that it can be simulated and its memory counted beside the schedules of
// shard/builder.h.
//
// What it has that ours have not: the root is one unit of embedding and head, gathered before anything else
// and reduced after everything else; gathers and reductions share a communicator; shards are cast and copied
// in before a gather, weights copied out after it, gradients copied in before a reduction; one input of a
// reduction exists at a time, and the passes wait for it; the optimizer waits for all reductions.
//
// Non-goals: to be executed; the time that the host takes; FSDP2's opt-ins (explicit forward prefetch, more
// reduction inputs, a communicator per direction, no synchronisation between micro-batches).
#pragma once

#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "shard/layout.h"
#include "shard/memory_plan.h"
#include "shard/program.h"
#include "shard/schedule.h"

namespace minillm::shard {

/// Bytes of tensors that eager PyTorch has on a rank for one micro-batch, beside weights and what is reduced.
struct EagerMemory {
  int64_t inputs = 0;               ///< what a step keeps from end to end: tokens and targets, scalars
  int64_t residual = 0;             ///< output of the embedding or of a block; as much, its gradient
  int64_t block_saved = 0;          ///< saved by a block for its backward pass, its input apart
  int64_t block_forward_extra = 0;  ///< most that its forward pass has beyond that, its output apart
  /// Most that its backward pass has beyond all that was saved and the gradient of its output: gradients of
  /// activations and, of the products that came so far, those of weights. What was saved is freed meanwhile.
  int64_t block_backward = 0;
  /// Most that the head's passes and the loss have at once, including the gradients of the head's weights and
  /// of its input, which they leave behind.
  int64_t loss = 0;
};

struct Fsdp2Options {
  int replicas = 1;       ///< copies of the model (HSDP); the ranks that share one are the layout's world
  int micro_batches = 1;  ///< each is gathered and reduced for itself, FSDP2's default
  bool clip = false;      ///< gradients are scaled by their norm before the optimizer
  DType parameter_type = DType::kBf16;  ///< of gathered weights and of their gradients before the reduction
  EagerMemory memory = {};
};

/// All memory of the step is in `buffers`: a region of kind kBuffer is an index into them, and a tensor that
/// is made twice (weights, for each pass) is two of them. Master weights and moments (kParameters, kMoments)
/// live for the whole run, all else from the first to the last operation that names it. An operation also
/// names what FSDP2 still holds while it runs, though it has no use for it. Buffers of no bytes stand for
/// events: they order operations as FSDP2 does where no data does.
struct Fsdp2 {
  Schedule schedule;
  std::vector<BufferSpec> buffers;
};

/// Unit 0 of the layout is the embedding, the last the head: operations on the root are a pair of operations
/// on these two, side by side, which share the root's buffers, so that none of what follows starts before
/// both are done: the bytes are FSDP2's, the latency of a collective counts twice. Reductions are in fp32.
/// Parameters are padded as the layout pads them; FSDP2 pads each tensor's first dimension to a multiple of
/// the ranks. Without sharding (world 1) there is nothing to gather and nothing is prefetched: right before a
/// pass its stream casts the unit's tensors one by one and copies them (kCopyOut); and kAccumulate is the
/// copy that stands for the reduction.
///
/// Throws InternalError for fewer than two units, or less than one replica or micro-batch.
Fsdp2 build_fsdp2(const Layout& layout, const Fsdp2Options& options);

/// Device memory that an operation reads and writes for FSDP2's copies alone: of kCopyIn (a cast unless
/// weights are fp32, then a copy), kCopyOut (without sharding the cast, too), kReduceCopyIn, and kClip (which
/// scales all gradient shards); 0 for the others.
int64_t copy_bytes(const Operation& operation, const Layout& layout, DType parameter_type);

/// The memory table: `bytes` is the largest sum of tensors alive at once in the order of the list, which is
/// what PyTorch reports as allocated, without fragmentation and libraries' workspaces, when gradients are
/// dropped before the forward pass and the optimizer is fused. Nothing is placed: there are no offsets.
MemoryPlan live_memory(const Fsdp2& step, const Layout& layout);

}  // namespace minillm::shard
