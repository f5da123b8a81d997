// A training step as data: the operations in the order in which the host issues them, the stream that each
// runs on, and the regions of memory that each reads and writes. Everything else about the order is derived
// (shard/waits.h), checked (shard/hazards.h), laid out (shard/memory_plan.h) and executed (shard/executor.h).
//
// This folder knows units, slots and a callback interface; never a transformer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace minillm::shard {

enum class StreamId : uint8_t { kCompute, kGather, kReduce };
inline constexpr int kStreamCount = 3;
const char* name_of(StreamId stream);  ///< "compute", "gather" or "reduce"

enum class OpKind : uint8_t {
  kBegin,           ///< inputs of the step onto the device, number of valid targets counted
  kGather,          ///< weight slot of `unit` = all-gather of the parameter shards
  kForward,         ///< forward pass of `unit`
  kHeadLoss,        ///< forward and backward pass of the last unit, with the loss
  kBackward,        ///< backward pass of `unit`: gradients of input and weights
  kReduceScatter,   ///< gradient shard of `unit` = sum over ranks of its gradient slot
  kAllReduceCount,  ///< number of valid targets, over ranks
  kSquareNorm,      ///< sum of squares of the gradient shard of `unit`
  kCollectStats,    ///< local loss sum and sum of squares side by side
  kAllReduceStats,  ///< both, over ranks
  kClip,            ///< gradient norm and clip factor
  kUpdate,          ///< optimizer step on the shard of `unit`; writes its parameter shard
  kReadBack,        ///< loss and norm to the host
};

/// A named piece of memory. `index` is a unit or a slot, by kind.
enum class RegionKind : uint8_t {
  kParameterShard,  ///< by unit: compute-precision shard, what gathers read (full weights when world is 1)
  kOptimizerShard,  ///< by unit: fp32 master weights and moments
  kGradientShard,   ///< by unit: reduced gradients (full gradients when world is 1)
  kWeightSlot,      ///< by slot: gathered weights of a unit
  kGradientSlot,    ///< by slot: unreduced gradients of a unit
  kBuffer,          ///< by index into Program::buffers()
  kValidCount,      ///< number of valid targets
  kLossSum,         ///< local loss sum
  kNormPartial,     ///< by unit: sum of squares
  kStats,           ///< loss sum and sum of squares
  kClip,            ///< gradient norm and clip factor
};
struct Region {
  RegionKind kind{};
  int index = 0;
  friend auto operator<=>(const Region&, const Region&) = default;
};

struct Operation {
  OpKind kind{};
  int unit = -1;  ///< -1 where it concerns none
  StreamId stream{};
  int weight_slot = -1;    ///< slot that holds this unit's weights, -1: none needed or world is 1
  int gradient_slot = -1;  ///< slot that receives or holds this unit's gradients, -1 likewise
  std::vector<Region> reads;
  std::vector<Region> writes;
};

/// A slot: its group and length. Slots are numbered over all groups.
struct Slot {
  int group = 0;
  int64_t elements = 0;  ///< padded length of the longest unit of the group
};

struct Schedule {
  int world = 1;
  std::vector<Operation> operations;
  std::vector<Slot> weight_slots;
  std::vector<Slot> gradient_slots;
};

/// "gather block3 -> weight slot 1", for messages and listings. `unit_names` may be empty.
std::string describe(const Operation& operation, const std::vector<std::string>& unit_names);
std::string describe(const Region& region, const std::vector<std::string>& unit_names);

}  // namespace minillm::shard
