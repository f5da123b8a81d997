// Maxima of elements as they lie in memory: two bf16 per instruction and no conversion to fp32, which a
// kernel short of registers would otherwise keep for all elements of a row.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/device/ptx.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {

/// Element by element the larger one. NaN loses against a number, as with fmaxf.
template <class T, int N>
__device__ inline Packed<T, N> packed_max(const Packed<T, N>& a, const Packed<T, N>& b) {
  Packed<T, N> result;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    uint32_t left[N / 2], right[N / 2];
    memcpy(left, &a, sizeof left);
    memcpy(right, &b, sizeof right);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) left[i] = max_bf16(left[i], right[i]);
    memcpy(&result, left, sizeof result);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      result.element[i] = from_float<T>(fmaxf(to_float(a.element[i]), to_float(b.element[i])));
  }
  return result;
}

}  // namespace minillm::kernels
