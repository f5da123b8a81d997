// Sums and maxima over a warp or a block, in an order that depends on the block's size only: every thread
// gets the same bits, on every run and every GPU. Reduce within the thread first; these are for what is left.
//
//   struct Shared { ReduceStorage reduce; … };
//   const float total = block_sum(mine, shared<Shared>().reduce);
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "kernels/device/at_once.h"

namespace minillm::kernels {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// What the block reductions need in shared memory.
struct ReduceStorage {
  float of_warp[1024 / kWarpSize];
};

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
/// Ignores NaN, as fmaxf does: a kernel that must not lose one finds it in its sum.
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Combines all 32 lanes, which must all take part.
template <class Combine>
__device__ inline float warp_reduce(float value, Combine combine) {
  if (meets_at_once()) {
    reduce_lanes<Combine>(value);
    return value;
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

/// Combines the threads of a block that have the same threadIdx.y (all of them in a one-dimensional block),
/// warps in ascending order; blockDim.x is a multiple of 32. Unless it is 32, all threads of the block must
/// take part. The storage may be used again at once: the first barrier waits for the readers of an earlier
/// call.
template <class Combine>
__device__ inline float block_reduce(float value, ReduceStorage& storage, Combine combine) {
  value = warp_reduce(value, combine);
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  if (warps == 1) return value;
  float* const of_warp = storage.of_warp + static_cast<int>(threadIdx.y) * warps;
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float result = of_warp[0];
  for (int warp = 1; warp < warps; ++warp) result = combine(result, of_warp[warp]);
  return result;
}

__device__ inline float warp_sum(float value) {
  return warp_reduce(value, Add{});
}
__device__ inline float warp_max(float value) {
  return warp_reduce(value, Max{});
}
__device__ inline float block_sum(float value, ReduceStorage& storage) {
  return block_reduce(value, storage, Add{});
}
__device__ inline float block_max(float value, ReduceStorage& storage) {
  return block_reduce(value, storage, Max{});
}

}  // namespace minillm::kernels
