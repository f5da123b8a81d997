// Stochastic rounding to bf16 with random bits that are a pure function of (seed, step, element): the same on
// every run, at any world size and however an array is cut into launches.
#pragma once

#include <cstdint>

#include "core/philox.h"

namespace minillm::kernels {

/// Elements that share one Philox call: adjacent ones, from a multiple of this on.
inline constexpr int kElementsPerDraw = 4;

/// 32 random bits for each of the elements group · kElementsPerDraw + {0, 1, 2, 3} of the whole model, at
/// `step`. The top bit of the stream keeps them apart from initial values drawn with the same seed.
constexpr PhiloxWords rounding_words(uint64_t seed, int64_t step, int64_t group) {
  return philox(seed, uint64_t{1} << 63 | static_cast<uint64_t>(step), static_cast<uint64_t>(group));
}

/// The bf16 neighbours of a finite fp32 value, each with a probability such that their mean is the value:
/// `random` is uniform in [0, 2^16). A finite value never becomes infinite; infinities stay, NaN stays NaN.
/// Takes and gives bits.
constexpr uint16_t stochastic_bf16(uint32_t value, uint32_t random) {
  constexpr uint32_t kExponent = 0x7f800000, kSign = 0x80000000, kLargest = 0x7f7f;
  if ((value & ~kSign) > kExponent) return 0x7fff;
  if ((value & kExponent) == kExponent) return static_cast<uint16_t>(value >> 16);
  const uint32_t magnitude = ((value & ~kSign) + random) >> 16;
  return static_cast<uint16_t>((value & kSign) >> 16 | (magnitude > kLargest ? kLargest : magnitude));
}

}  // namespace minillm::kernels
