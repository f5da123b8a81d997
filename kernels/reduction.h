// Sums of fp32 arrays in an order that depends only on the length, never on the GPU: fixed ranges are summed
// to partials by one launch, the partials in a fixed order (in double) by a second.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"

namespace minillm::kernels {

struct Sum {
  float* out = nullptr;       ///< one fp32, written; no aliasing
  const float* in = nullptr;  ///< [count]
  float* scratch = nullptr;   ///< sum_scratch(count) bytes, any contents
  int64_t count = 0;
  bool square = false;      ///< sum of squares instead: the gradient norm's partial for a shard
  bool accumulate = false;  ///< out += the finished sum rounded to fp32, one fp32 addition, instead of =
};
/// Non-finite inputs give a non-finite sum. Throws DeviceError when a launch fails.
void sum(const Sum& a, cudaStream_t stream);
int64_t sum_scratch(int64_t count);
Cost sum_cost(int64_t count, bool accumulate = false);

}  // namespace minillm::kernels
