// bf16 on the host, written apart from the code under test.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace minillm::test {

inline float bf16_value(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

/// The nearest bf16, ties to even, by comparing the two neighbours' distances; for finite values.
inline uint16_t nearest_bf16(double value) {
  const float single = static_cast<float>(value);
  uint32_t wide;
  std::memcpy(&wide, &single, sizeof wide);
  const auto toward_zero = static_cast<uint16_t>(wide >> 16);
  const auto away = static_cast<uint16_t>(toward_zero + 1);
  const double below = std::fabs(value - bf16_value(toward_zero)),
               above = std::fabs(value - bf16_value(away));
  if (below != above) return below < above ? toward_zero : away;
  return toward_zero % 2 == 0 ? toward_zero : away;
}

}  // namespace minillm::test
