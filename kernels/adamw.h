// AdamW (Loshchilov & Hutter 2019) over one contiguous range of a flat parameter shard, PyTorch's formula:
//   p -= lr · weight_decay · p;  m = lerp(m, g, 1-β1);  v = β2 v + (1-β2) g²
//   p -= lr / (1-β1^t) · m / (sqrt(v) / sqrt(1-β2^t) + eps)          with g = gradient · *gradient_scale
// Master parameters are fp32. Beside bf16 compute they lie in two halves (core/split_float.h), of which the
// upper is the bf16 that the next gather reads: the copy costs neither memory nor traffic.
//
// Moments are fp32, or bf16 with stochastic rounding: rounded to nearest, a second moment with β2 = 0.999
// would stand still, its changes being smaller than half of bf16's spacing. The random bits are a function of
// (seed, step, index of the element in the unsharded model, moment): results depend neither on the world size
// nor on how a shard is cut into launches.
//
// What changes from step to step is read from device memory, AdamWStep: the launches of a captured CUDA graph
// are the same for every step.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

/// What all steps have in common.
struct AdamWOptions {
  double beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
};

/// What is a step's own, made by adamw_step() and copied to the device.
struct alignas(16) AdamWStep {
  double learning_rate = 0;
  int64_t step = 0;      ///< t of the formula; decides, with the seed, how bf16 moments are rounded
  float step_size = 0;   ///< lr / (1-β1^t)
  float correction = 0;  ///< 1 / sqrt(1-β2^t)
};
static_assert(std::is_trivially_copyable_v<AdamWStep> && sizeof(AdamWStep) == 32);

/// The numbers of update `step`, which is 1 for the first, computed in double. Throws InternalError for a
/// step below 1, which has no bias correction.
AdamWStep adamw_step(const AdamWOptions& options, double learning_rate, int64_t step);

struct AdamW {
  void* parameter = nullptr;        ///< [count] masters in fp32, or their bf16 halves, updated
  uint16_t* lower_half = nullptr;   ///< [count] the masters' other halves, updated; nullptr: masters are fp32
  void* moment1 = nullptr;          ///< [count] moment_type, updated
  void* moment2 = nullptr;          ///< [count] moment_type, updated
  const float* gradient = nullptr;  ///< [count] fp32
  /// One device scalar that multiplies the gradient: the clip factor. Not finite: the whole update is skipped
  /// and nothing is written.
  const float* gradient_scale = nullptr;
  const AdamWStep* step = nullptr;  ///< in device memory, read when the kernel runs; of the same options
  int64_t count = 0;
  AdamWOptions options = {};
  DType moment_type = DType::kFp32;
  // Of bf16 moments only:
  uint64_t seed = 0;
  int64_t first_element = 0;  ///< index in the whole model of element 0; fastest as a multiple of 4
};
/// An element whose gradient is not finite once it is scaled, or so large that the second moment would not
/// be, keeps its master and its moments: an update that runs before anyone knows the norm of all gradients
/// loses nothing. No aliasing. Throws DeviceError when the launch fails.
void adamw(const AdamW& a, cudaStream_t stream);
Cost adamw_cost(int64_t count, DType moment_type = DType::kFp32);

/// The factor that `adamw` multiplies gradients by: with norm = sqrt(sum_of_squares[0]),
///   norm not finite: NaN;  limit <= 0: 1;  otherwise min(1, limit / (norm + 1e-6)), as PyTorch clips.
struct ClipFactor {
  float* factor = nullptr;                ///< one fp32, written
  float* norm = nullptr;                  ///< one fp32, written
  const float* sum_of_squares = nullptr;  ///< one fp32: over all parameters of all ranks
  float limit = 0;
};
void clip_factor(const ClipFactor& a, cudaStream_t stream);

}  // namespace minillm::kernels
