// What the executor asks of the layers above: buffers to plan, and the work of each operation.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/cost.h"
#include "shard/layout.h"
#include "shard/schedule.h"

namespace minillm::shard {

/// What memory is for: the rows of the memory table.
enum class Purpose : uint8_t {
  kParameters,
  kGradients,
  kMoments,
  kWeightSlots,
  kGradientSlots,
  kActivations,
  kScratch,
  kInputs,
  kWorkspace,
};
inline constexpr std::array kPurposes = {
    Purpose::kParameters,  Purpose::kMoments,       Purpose::kGradients,
    Purpose::kWeightSlots, Purpose::kGradientSlots, Purpose::kActivations,
    Purpose::kScratch,     Purpose::kInputs,        Purpose::kWorkspace,
};  ///< in the order of the table
const char* name_of(Purpose purpose);

/// A buffer that the program owns and the plan places.
struct BufferSpec {
  std::string name;
  int64_t bytes = 0;
  Purpose purpose = Purpose::kActivations;
};

/// Buffers (indices into Program::buffers()) that an operation touches. A buffer's lifetime in the step is
/// from the first to the last operation that names it; buffers whose lifetimes do not meet may share memory,
/// so an operation finds a buffer undefined unless an earlier operation of the same step wrote it.
struct BufferUse {
  std::vector<int> reads;
  std::vector<int> writes;
};

/// Device addresses for one operation. Members that an operation has no use for are null: those of regions
/// that it neither reads nor writes in the schedule.
struct Operands {
  const std::byte* weights = nullptr;  ///< flat gathered weights of the unit, compute precision
  /// Flat gradient buffer of the unit: a slot, or the shard without sharding. Of it the operation has its
  /// segment, undefined but for the padding, which is zero and has to stay so; where the operation
  /// accumulates, or is kBackwardWeight, with what earlier ones made.
  float* gradients = nullptr;
  std::byte* const* buffers = nullptr;  ///< by index into Program::buffers()

  // The shard of the unit, layout.units[unit].shard_elements long, whatever segment the operation is about.
  std::byte* parameter_shard = nullptr;  ///< compute precision; in fp32 the master weights
  uint16_t* lower_half = nullptr;        ///< what bf16 ones lack of the masters (core/split_float.h), or null
  std::byte* moment1 = nullptr;          ///< in the type that the memory was planned for
  std::byte* moment2 = nullptr;
  float* gradient_shard = nullptr;

  // Slots of the reduction, for kCast and kAccumulate.
  std::byte* wire = nullptr;           ///< flat buffer of the unit in the type of the reduction
  std::byte* reduced_piece = nullptr;  ///< as long as the shard, in the type of the reduction

  // Scalars of the step.
  float* valid_count = nullptr;    ///< targets that count: local after kBegin, of all ranks in kHeadLoss
  float* loss_sum = nullptr;       ///< local sum of losses of the micro-batch, written by kHeadLoss;
                                   ///< of kCollectLoss: all [micro_batches]
  float* loss_total = nullptr;     ///< {loss sum, valid targets}: local after kCollectLoss, then of all ranks
  float* gate = nullptr;           ///< {factor, unused}, written by kGate
  float* norm_partials = nullptr;  ///< [segments of all units], written by kSquareNorm
  float* norm_total = nullptr;     ///< sum of squares, of the rank, then of the model
  float* clip = nullptr;           ///< {gradient norm, clip factor}, written by kClip
};

/// The least work of a kernel that an operation launches: what a hardware model needs.
struct KernelWork {
  enum class Unit : uint8_t { kProduct, kAttention, kOther };
  Unit unit = Unit::kOther;
  Cost cost;
};

/// The transformer and the optimizer as the executor sees them. All calls come from one host thread and only
/// enqueue work on `stream`; none blocks or allocates.
class Program {
 public:
  virtual ~Program() = default;

  /// The buffers that the program wants planned; constant over the program's life.
  virtual const std::vector<BufferSpec>& buffers() const = 0;
  /// What an operation touches of them. Called for every operation that compute() is called for, before it
  /// has slots and regions.
  virtual BufferUse uses(const Operation& operation) const = 0;

  /// Everything but the collectives (is_collective()) and what only plans have (kCopyIn, kCopyOut,
  /// kReduceCopyIn).
  virtual void compute(const Operation& operation, const Operands& operands, cudaStream_t stream) = 0;

  /// The kernels that compute() launches for it. May be called without a device.
  virtual std::vector<KernelWork> work(const Operation& operation) const = 0;
};

}  // namespace minillm::shard
