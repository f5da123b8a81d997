// The subset of cuda_bf16.h that the project uses, for the simulated device. Conversion from float rounds to
// nearest even; a NaN becomes 0x7FFF, as on the GPU.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

namespace sim {
constexpr unsigned short bfloat16_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const uint32_t nan =
      0u - uint32_t{(bits & 0x7fffffffu) > 0x7f800000u};  // a mask: branches would not vectorize
  return static_cast<unsigned short>((nan & 0x7fffu) | (~nan & rounded));
}
constexpr float bfloat16_value(unsigned short bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}
}  // namespace sim

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  constexpr __nv_bfloat16(__nv_bfloat16_raw raw) : __x(raw.x) {}
  constexpr __nv_bfloat16(float value) : __x(sim::bfloat16_bits(value)) {}
  constexpr operator __nv_bfloat16_raw() const { return {__x}; }
  constexpr operator float() const { return sim::bfloat16_value(__x); }

 protected:
  unsigned short __x;
};
using nv_bfloat16 = __nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat162() = default;
  constexpr __nv_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) : x(low), y(high) {}
  __nv_bfloat16 x;
  __nv_bfloat16 y;
};
using nv_bfloat162 = __nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float value) {
  return __nv_bfloat16(value);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  return __nv_bfloat16(value);
}
inline float __bfloat162float(__nv_bfloat16 value) {
  return static_cast<float>(value);
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
  return std::bit_cast<unsigned short>(value);
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return __nv_bfloat16_raw{bits};
}

inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) {
  return {low, high};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__nv_bfloat16(low), __nv_bfloat16(high)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) {
  return __floats2bfloat162_rn(value.x, value.y);
}
inline __nv_bfloat162 __float2bfloat162_rn(float value) {
  return __floats2bfloat162_rn(value, value);
}
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) {
  return {value, value};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return make_float2(static_cast<float>(pair.x), static_cast<float>(pair.y));
}
inline float __low2float(__nv_bfloat162 pair) {
  return static_cast<float>(pair.x);
}
inline float __high2float(__nv_bfloat162 pair) {
  return static_cast<float>(pair.y);
}
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) {
  return pair.x;
}
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) {
  return pair.y;
}
