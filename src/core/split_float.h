// An fp32 number in two halves of 16 bits, the upper of which is its rounding to bf16: fp32 master weights
// whose bf16 copy takes no memory of its own.
//
// Rounds to nearest, and away from zero what lies in the middle. To the even neighbour, as conversions round
// it, an even half would stand for one number more than 16 bits can tell apart.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MINILLM_HOST_DEVICE __host__ __device__
#else
#define MINILLM_HOST_DEVICE
#endif

namespace minillm {

struct SplitFloat {
  uint16_t upper;  ///< bits of the bf16
  uint16_t lower;  ///< the fp32's own lower bits
};

/// Takes the bits of an fp32. A NaN becomes the one with the largest upper half, or it could round to a
/// number.
MINILLM_HOST_DEVICE constexpr SplitFloat split_float(uint32_t bits) {
  constexpr uint32_t kSign = 0x80000000, kInfinity = 0x7f800000;
  if ((bits & ~kSign) > kInfinity) return {0x7fff, 0};
  return {static_cast<uint16_t>((bits + 0x8000) >> 16), static_cast<uint16_t>(bits)};
}

/// The bits of the fp32 again: where the lower half made the upper round up, the upper is one less.
MINILLM_HOST_DEVICE constexpr uint32_t join_float(SplitFloat halves) {
  return ((uint32_t{halves.upper} << 16) | halves.lower) - (uint32_t{halves.lower & 0x8000u} << 1);
}

}  // namespace minillm
