// CUDA's built-in vector types, with CUDA's alignment: a misaligned vector access is then undefined behaviour
// that UndefinedBehaviorSanitizer reports, as the GPU would.
#pragma once

#define SIM_VECTOR2(type, scalar, alignment)              \
  struct alignas(alignment) type {                        \
    scalar x, y;                                          \
  };                                                      \
  inline constexpr type make_##type(scalar x, scalar y) { \
    return type{x, y};                                    \
  }
#define SIM_VECTOR3(type, scalar)                                   \
  struct type {                                                     \
    scalar x, y, z;                                                 \
  };                                                                \
  inline constexpr type make_##type(scalar x, scalar y, scalar z) { \
    return type{x, y, z};                                           \
  }
#define SIM_VECTOR4(type, scalar, alignment)                                  \
  struct alignas(alignment) type {                                            \
    scalar x, y, z, w;                                                        \
  };                                                                          \
  inline constexpr type make_##type(scalar x, scalar y, scalar z, scalar w) { \
    return type{x, y, z, w};                                                  \
  }

SIM_VECTOR2(char2, signed char, 2)
SIM_VECTOR2(uchar2, unsigned char, 2)
SIM_VECTOR2(short2, short, 4)
SIM_VECTOR2(ushort2, unsigned short, 4)
SIM_VECTOR2(int2, int, 8)
SIM_VECTOR2(uint2, unsigned, 8)
SIM_VECTOR2(float2, float, 8)
SIM_VECTOR2(longlong2, long long, 16)
SIM_VECTOR2(ulonglong2, unsigned long long, 16)
SIM_VECTOR2(double2, double, 16)
SIM_VECTOR3(int3, int)
SIM_VECTOR3(uint3, unsigned)
SIM_VECTOR3(float3, float)
SIM_VECTOR4(char4, signed char, 4)
SIM_VECTOR4(uchar4, unsigned char, 4)
SIM_VECTOR4(short4, short, 8)
SIM_VECTOR4(ushort4, unsigned short, 8)
SIM_VECTOR4(int4, int, 16)
SIM_VECTOR4(uint4, unsigned, 16)
SIM_VECTOR4(float4, float, 16)

#undef SIM_VECTOR2
#undef SIM_VECTOR3
#undef SIM_VECTOR4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};
