// fp32 values into the two halves of core/split_float.h: master weights as they are kept beside bf16 compute.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace minillm::kernels {

struct Split {
  uint16_t* upper = nullptr;  ///< [count] bf16, written
  uint16_t* lower = nullptr;  ///< [count] written
  const float* in = nullptr;  ///< [count] fp32
  int64_t count = 0;
};
/// No aliasing. Once per run: not a kernel to be fast. Throws DeviceError when the launch fails.
void split(const Split& a, cudaStream_t stream);

}  // namespace minillm::kernels
