// Elements of tensors in registers: vectors of up to 16 bytes that are loaded and stored at once and computed
// with as fp32, and the host's choice of element type and vector width for a launch.
//
//   dispatch(a.dtype, access_bytes({a.y, a.x}, a.columns * size_of(a.dtype)), [&]<class T, int N>() {
//     launch("op", op_kernel<T, N>, …);        // N · sizeof(T) is 16, 4 or sizeof(T)
//   });
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "core/dtype.h"

namespace minillm::kernels {

/// Elements of T in 16 bytes, the widest access of a thread.
template <class T>
inline constexpr int kFullWidth = 16 / static_cast<int>(sizeof(T));

__host__ __device__ inline float to_float(float value) {
  return value;
}
__host__ __device__ inline float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

/// `value` rounded to nearest even.
template <class T>
__host__ __device__ inline T from_float(float value) {
  if constexpr (std::is_same_v<T, float>)
    return value;
  else
    return __float2bfloat16_rn(value);
}

/// N values in fp32.
template <int N>
struct Floats {
  float value[N];
  __host__ __device__ float& operator[](int i) { return value[i]; }
  __host__ __device__ const float& operator[](int i) const { return value[i]; }
};

/// N elements of T as they lie in memory: what a kernel keeps of a row between two uses, at T's size.
/// N · sizeof(T) is 16, or N is smaller for the sake of alignment.
template <class T, int N>
struct alignas(sizeof(T) * N) Packed {
  static_assert(sizeof(T) * N <= 16 && (N & (N - 1)) == 0);
  T element[N];

  __device__ Floats<N> floats() const {
    Floats<N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result[i] = to_float(element[i]);
    return result;
  }
};

/// One access; `from` is aligned to N elements.
template <int N, class T>
__device__ inline Packed<T, N> load_packed(const T* from) {
  return *reinterpret_cast<const Packed<T, N>*>(from);
}

/// One access, converted to fp32; `from` is aligned to N elements.
template <int N, class T>
__device__ inline Floats<N> load(const T* from) {
  return load_packed<N>(from).floats();
}

/// Each value rounded to T.
template <class T, int N>
__device__ inline Packed<T, N> pack(const Floats<N>& values) {
  Packed<T, N> packed;
  if constexpr (N > 1 && std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {  // one instruction rounds two
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[i], values[i + 1]);
      packed.element[i] = pair.x;
      packed.element[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) packed.element[i] = from_float<T>(values[i]);
  }
  return packed;
}

/// One access; `to` is aligned to N elements.
template <class T, int N>
__device__ inline void store_packed(T* to, const Packed<T, N>& values) {
  *reinterpret_cast<Packed<T, N>*>(to) = values;
}

/// One access, each value rounded to T; `to` is aligned to N elements.
template <class T, int N>
__device__ inline void store(T* to, const Floats<N>& values) {
  store_packed(to, pack<T>(values));
}

/// The widest access of a thread, 16, 8, 4, 2 or 1 bytes, for which every pointer is aligned and so is every
/// row of `row_bytes` after the first (leave it 0 for flat arrays). Null pointers stand for absent tensors.
inline int access_bytes(std::initializer_list<const void*> pointers, int64_t row_bytes = 0) {
  uintptr_t bits = 16 | static_cast<uintptr_t>(row_bytes);
  for (const void* pointer : pointers) bits |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int>(bits & -bits);
}

/// Whether every access can be 16 bytes wide.
inline bool can_vectorize(std::initializer_list<const void*> pointers, int64_t row_bytes = 0) {
  return access_bytes(pointers, row_bytes) == 16;
}

/// Calls body.operator()<T>() with the type that `type` names.
template <class Body>
void dispatch(DType type, const Body& body) {
  if (type == DType::kFp32)
    body.template operator()<float>();
  else
    body.template operator()<__nv_bfloat16>();
}

/// Calls body.operator()<T, N>(): N elements are 16 bytes if `access` (of access_bytes()) is, else 4 bytes if
/// it is as much, else one element.
template <class Body>
void dispatch(DType type, int access, const Body& body) {
  dispatch(type, [&]<class T>() {
    constexpr int kWord = 4 / static_cast<int>(sizeof(T));
    if (access == 16)
      body.template operator()<T, kFullWidth<T>>();
    else if (kWord > 1 && access >= 4)
      body.template operator()<T, kWord>();
    else
      body.template operator()<T, 1>();
  });
}

}  // namespace minillm::kernels
