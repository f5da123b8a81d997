// Prefix sums of integers over a block.
#pragma once

#include <cuda_runtime.h>

#include "kernels/device/reduce.h"

namespace minillm::kernels {

/// What block_exclusive_sum needs in shared memory.
struct ScanStorage {
  int of_warp[1024 / kWarpSize];
};

/// The sum of the values of all threads before this one. All threads of a one-dimensional block of whole
/// warps take part. The storage may be used again at once: the first barrier waits for the readers of an
/// earlier call.
__device__ inline int block_exclusive_sum(int value, ScanStorage& storage) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int inclusive = value;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, inclusive, distance);
    if (lane >= distance) inclusive += before;
  }
  __syncthreads();
  if (lane == kWarpSize - 1) storage.of_warp[warp] = inclusive;
  __syncthreads();
  int result = inclusive - value;
  for (int other = 0; other < warp; ++other) result += storage.of_warp[other];
  return result;
}

}  // namespace minillm::kernels
