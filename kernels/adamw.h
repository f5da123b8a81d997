// AdamW (Loshchilov & Hutter 2019) over one contiguous range of a flat parameter shard, PyTorch's formula:
//   p -= lr · weight_decay · p;  m = lerp(m, g, 1-β1);  v = β2 v + (1-β2) g²
//   p -= lr / (1-β1^t) · m / (sqrt(v) / sqrt(1-β2^t) + eps)          with g = gradient · *gradient_scale
// fp32 master parameters; writes the compute-precision copy for the next gather in the same pass.
//
// Moments are fp32, or bf16 with stochastic rounding: rounded to nearest, a second moment with β2 = 0.999
// would stand still, its changes being smaller than half of bf16's spacing. The random bits are a function of
// (seed, step, index of the element in the unsharded model, moment): results depend neither on the world size
// nor on how a shard is cut into launches.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

struct AdamW {
  float* master = nullptr;          ///< [count] fp32 parameters, updated
  void* moment1 = nullptr;          ///< [count] moment_type, updated
  void* moment2 = nullptr;          ///< [count] moment_type, updated
  void* parameter = nullptr;        ///< [count] bf16 copy of master, written; nullptr: none is kept
  const float* gradient = nullptr;  ///< [count] fp32
  /// One device scalar that multiplies the gradient: the clip factor. Not finite: the whole update is skipped
  /// and nothing is written.
  const float* gradient_scale = nullptr;
  int64_t count = 0;
  double learning_rate = 0, beta1 = 0, beta2 = 0, epsilon = 0, weight_decay = 0;
  int64_t step = 0;  ///< t of the formula: 1 for the first update
  DType moment_type = DType::kFp32;
  // Of bf16 moments only:
  uint64_t seed = 0;
  int64_t first_element = 0;  ///< index in the whole model of element 0; fastest as a multiple of 4
};
/// Throws DeviceError when the launch fails.
void adamw(const AdamW& a, cudaStream_t stream);
Cost adamw_cost(int64_t count, bool parameter_copy, DType moment_type = DType::kFp32);

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
