// Conversion between element types, rounded to nearest even.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

struct Cast {
  void* out = nullptr;       ///< [count] out_type, written; no aliasing
  const void* in = nullptr;  ///< [count] in_type
  int64_t count = 0;
  DType out_type = DType::kBf16, in_type = DType::kFp32;
};
/// Throws DeviceError when the launch fails.
void cast(const Cast& a, cudaStream_t stream);
Cost cast_cost(const Cast& a);

}  // namespace minillm::kernels
