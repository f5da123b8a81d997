// Elements of tensors in registers: vectors of up to 16 bytes that are loaded and stored at once and computed
// with as fp32, and the host's choice of element type and vector width for a launch.
//
//   dispatch(a.dtype, can_vectorize({a.y, a.x}, a.columns * size_of(a.dtype)), [&]<class T, int N>() {
//     launch("op", op_kernel<T, N>, …);        // N is 16 / sizeof(T) or 1
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

/// One access, each value rounded to T; `to` is aligned to N elements.
template <class T, int N>
__device__ inline void store(T* to, const Floats<N>& values) {
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
  *reinterpret_cast<Packed<T, N>*>(to) = packed;
}

/// Covers a flat array of `count` elements with the whole grid, one vector per thread: body.operator()<N>(i)
/// for each full vector, operator()<1>(i) for each element of the tail. Launch with `vector_blocks`.
template <int N, class Body>
__device__ inline void for_vector_of_thread(int64_t count, const Body& body) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t vectors = count / N;
  if (thread < vectors) {
    body.template operator()<N>(thread * N);
  } else if (N > 1) {
    const int64_t i = vectors * N + (thread - vectors);
    if (i < count) body.template operator()<1>(i);
  }
}

/// Blocks that `for_vector_of_thread<N>` needs.
constexpr unsigned vector_blocks(int64_t count, int width, int threads) {
  return static_cast<unsigned>((count / width + count % width + threads - 1) / threads);
}

/// Whether every pointer is 16-byte aligned and so is every row of `row_bytes` after the first (leave it 0
/// for flat arrays). Null pointers stand for absent tensors.
inline bool can_vectorize(std::initializer_list<const void*> pointers, int64_t row_bytes = 0) {
  if (row_bytes % 16 != 0) return false;
  for (const void* pointer : pointers)
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  return true;
}

/// Calls body.operator()<T>() with the type that `type` names.
template <class Body>
void dispatch(DType type, const Body& body) {
  if (type == DType::kFp32)
    body.template operator()<float>();
  else
    body.template operator()<__nv_bfloat16>();
}

/// Calls body.operator()<T, N>(): N is T's full width when `vectorize`, else 1.
template <class Body>
void dispatch(DType type, bool vectorize, const Body& body) {
  dispatch(type, [&]<class T>() {
    if (vectorize)
      body.template operator()<T, kFullWidth<T>>();
    else
      body.template operator()<T, 1>();
  });
}

}  // namespace minillm::kernels
