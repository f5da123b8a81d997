// Initial values of a range of a tensor from a counter-based generator: element i of tensor `stream` is the
// same at any world size, whichever rank computes it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace minillm::kernels {

enum class Distribution : uint8_t {
  kConstant,  ///< a
  kUniform,   ///< U(-a, a)
  kNormal,    ///< N(0, a²)
};

struct Initialize {
  float* out = nullptr;  ///< [count] fp32, written
  int64_t first = 0;     ///< index in the whole tensor of out[0]
  int64_t count = 0;
  Distribution distribution = Distribution::kConstant;
  float a = 0;
  uint64_t seed = 0;
  uint64_t stream = 0;  ///< the tensor: no two tensors of a model share one
};
/// Throws DeviceError when the launch fails.
void initialize(const Initialize& a, cudaStream_t stream);

}  // namespace minillm::kernels
