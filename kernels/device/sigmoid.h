// The logistic function in the precision that the tensors' type deserves.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernels/device/ptx.h"

namespace minillm::kernels {

/// 1 / (1 + exp(-x)). With bf16 the approximations' few units of fp32 vanish in the rounding, while exact
/// ones would make the arithmetic, not the memory, the limit; below x = -87 they may give 0. Large negative
/// x: exp is infinite and the quotient 0.
template <class T>
__device__ inline float sigmoid(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    constexpr float kMinusLog2E = -1.4426950408889634f;
    return reciprocal_approx(1.0f + exp2_approx(kMinusLog2E * x));
  }
}

/// d(x · sigmoid(x)) / dx, for s = sigmoid(x).
__device__ inline float silu_slope(float x, float s) {
  return s * (1.0f + x * (1.0f - s));
}

}  // namespace minillm::kernels
