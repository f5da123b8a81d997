// A training step as data: the operations in the order in which the host issues them, the stream that each
// runs on, and the regions of memory that each reads and writes. Everything else about the order is derived
// (shard/waits.h), checked (shard/hazards.h), laid out (shard/memory_plan.h), executed (shard/executor.h) and
// simulated (shard/timeline.h).
//
// This folder knows units, slots and a callback interface; never a transformer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace minillm::shard {

enum class StreamId : uint8_t {
  kCompute,    ///< the model's passes
  kGather,     ///< all-gathers of weights
  kReduce,     ///< reduce-scatters of gradients, and sums of scalars
  kReplicate,  ///< all-reduces of gradient shards over replicas
  kUpdate,     ///< norms and the optimizer
  kCopy,       ///< copies of shards before gathers, for schedules that need them
};
inline constexpr int kStreamCount = 6;
const char* name_of(StreamId stream);  ///< "compute", "gather", …

enum class OpKind : uint8_t {
  kUpload,             ///< inputs of the step onto the device, for all its micro-batches
  kSetStep,            ///< the optimizer's scalars of the step onto the device
  kBegin,              ///< number of valid targets of the step counted
  kAllReduceCount,     ///< number of valid targets, over all ranks
  kGather,             ///< weight slot of `unit` = all-gather of the parameter shards
  kForward,            ///< forward pass of `unit`
  kHeadLoss,           ///< forward and backward pass of the last unit, with the loss; of a `segment`: the
                       ///< forward pass, the loss and that segment's gradients, and kBackwardInput follows
  kRecompute,          ///< activations of `unit` made again from its input
  kBackward,           ///< backward pass of `unit`: gradients of input and weights
  kBackwardInput,      ///< the part of it that units before wait for: gradient of the input; of the last
                       ///< unit also the gradients of `segment`, -1: of none
  kBackwardWeight,     ///< the rest: gradients of the weights (of `segment`)
  kCast,               ///< gradients of `unit` rounded to the type of the reduction
  kReduceScatter,      ///< gradient shard (or reduced piece) of `unit` = sum over ranks of its gradients
  kAccumulate,         ///< the reduced piece of `unit` put into, or added to, its gradient shard
  kAllReduceGradient,  ///< gradient shard of `unit`, over replicas
  kSquareNorm,         ///< sum of squares of the gradient shard of `unit`
  kCollectLoss,        ///< local loss sum of all micro-batches, and the number of valid targets
  kAllReduceLoss,      ///< the loss sum, over all ranks
  kGate,               ///< the factor of updates that do not wait for the norm: 1, or NaN for a bad loss
  kCollectNorm,        ///< sum of squares of all units
  kAllReduceNorm,      ///< the same, over the ranks that share a model
  kClip,               ///< gradient norm and clip factor
  kUpdate,             ///< optimizer step on the shard of `unit`; writes its parameter shard
  kReadBack,           ///< loss and norm to the host
  kCopyIn,             ///< shard of `unit` cast and copied to where the gather reads it
  kCopyOut,            ///< gathered weights of `unit` copied to where its passes read them
  kReduceCopyIn,       ///< gradients of `unit` copied to where the reduce-scatter reads them
};
const char* name_of(OpKind kind);   ///< "gather", "backward input", …
bool is_collective(OpKind kind);    ///< whether it is the communicators' work, not Program::compute's
bool touches_host(OpKind kind);     ///< whether it exchanges data with the host: kUpload, kSetStep, kReadBack
bool makes_gradients(OpKind kind);  ///< whether it may write weight gradients: kHeadLoss, kBackward…

/// A named piece of memory. `index` is a unit, slot, buffer or micro-batch, by kind.
enum class RegionKind : uint8_t {
  kParameterShard,  ///< by unit: compute-precision shard, what gathers read (full weights without sharding)
  kOptimizerShard,  ///< by unit: moments, and what bf16 parameters lack of fp32
  kGradientShard,   ///< by shard slot: reduced gradients (full gradients without sharding)
  kWeightSlot,      ///< by slot: gathered weights of a unit
  kGradientSlot,    ///< by slot: unreduced gradients of a unit
  kWireSlot,        ///< gradients in the type of the reduction, where that is not fp32
  kReducedPiece,    ///< what a reduce-scatter leaves that may not overwrite the shard
  kBuffer,          ///< by index into Program::buffers()
  kValidCount,      ///< number of valid targets
  kLossSum,         ///< by micro-batch: local loss sum
  kLossTotal,       ///< loss sum of the step and number of valid targets
  kGate,            ///< factor of updates
  kNormPartial,     ///< by unit: sums of squares
  kNormTotal,       ///< sum of squares
  kClip,            ///< gradient norm and clip factor
};
struct Region {
  RegionKind kind{};
  int index = 0;
  int part = 0;  ///< of what belongs to a unit: a segment; of slots and shard slots: see PlaceParts
  friend auto operator<=>(const Region&, const Region&) = default;
};

struct Operation {
  OpKind kind{};
  int unit = -1;  ///< -1 where it concerns none
  StreamId stream{};
  int segment = -1;         ///< segment of the unit, -1: all
  int micro_batch = 0;      ///< that the passes work on
  bool accumulate = false;  ///< what it makes is added to what is there
  bool next_step = false;   ///< gathers: the weights are for the step after this one
  int weight_slot = -1;     ///< slot that holds this unit's weights, -1: none needed or not sharded
  int gradient_slot = -1;   ///< slot that receives or holds this unit's gradients, -1 likewise
  int shard_slot = -1;      ///< place of this unit's gradient shard, where it is touched
  std::vector<Region> reads = {};
  std::vector<Region> writes = {};
};

/// A place that units take in turn, as long as the longest of them.
struct Slot {
  int group = 0;  ///< weight slots: the units' slot group
  int64_t elements = 0;
};

struct Schedule {
  int shards = 1;         ///< ranks that share one copy of the model
  int replicas = 1;       ///< copies; rank = replica * shards + shard
  int micro_batches = 1;  ///< per step
  std::vector<Operation> operations;
  std::vector<Slot> weight_slots;
  std::vector<Slot> gradient_slots;  ///< fp32
  std::vector<Slot> shard_slots;     ///< fp32: of shard elements; full gradients without sharding
  int64_t wire_elements = 0;         ///< of the wire slot, 0: there is none
  int64_t reduced_elements = 0;      ///< of the reduced piece, 0: there is none
  DType reduce_type = DType::kFp32;  ///< of gradients on the wire, within the shards
  bool one_communicator = false;     ///< gathers and reductions take turns on the wire, in issue order

  int world() const { return shards * replicas; }
};

/// "gather block3 -> weight slot 1", for messages and listings. `unit_names` may be empty.
std::string describe(const Operation& operation, const std::vector<std::string>& unit_names);
std::string describe(const Region& region, const std::vector<std::string>& unit_names);

}  // namespace minillm::shard
