// SiLU: y = u · sigmoid(u), elementwise, fp32 arithmetic rounded once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

struct SiluForward {
  void* y = nullptr;        ///< [count] dtype, written; may alias u
  const void* u = nullptr;  ///< [count] dtype
  int64_t count = 0;
  DType dtype = DType::kBf16;
};
/// Throws DeviceError when the launch fails.
void silu_forward(const SiluForward& a, cudaStream_t stream);
Cost silu_forward_cost(int64_t count, DType dtype);

struct SiluBackward {
  void* du = nullptr;        ///< [count] dtype, written; may alias dy or u
  const void* dy = nullptr;  ///< [count] dtype
  const void* u = nullptr;   ///< [count] dtype, the forward input
  int64_t count = 0;
  DType dtype = DType::kBf16;
};
void silu_backward(const SiluBackward& a, cudaStream_t stream);
Cost silu_backward_cost(int64_t count, DType dtype);

}  // namespace minillm::kernels
