// Adding a gradient, or a reduced piece of one, to a sum over micro-batches that is kept in fp32.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

/// out = in, or out + in: one fp32 addition per element, so that sums depend on the order of the calls only.
struct Accumulate {
  float* out = nullptr;      ///< [count] fp32, written; no aliasing
  const void* in = nullptr;  ///< [count] in_type
  int64_t count = 0;
  DType in_type = DType::kFp32;
  bool accumulate = false;  ///< false: what out holds is replaced, as kernels::cast does
};
/// Throws DeviceError when the launch fails.
void accumulate(const Accumulate& a, cudaStream_t stream);
Cost accumulate_cost(const Accumulate& a);

}  // namespace minillm::kernels
