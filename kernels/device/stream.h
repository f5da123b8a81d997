// Kernels that pass over memory once: each thread has several independent 16-byte loads in flight before it
// uses the first, which is what keeps the memory busy when occupancy alone does not.
//
// The loop bodies are two functions: load(position) reads what one vector needs and returns it as it lay in
// memory; finish(position, loaded) computes and stores. All loads of a thread precede its stores, and no
// element belongs to two threads: outputs may alias inputs element for element.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/device/tiling.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {

inline constexpr int kStreamThreads = 256;
/// Blocks of an SM that suffice. Without it the compiler may prefer spilling to fewer.
inline constexpr int kStreamBlocks = 4;

/// Covers [0, count) with blocks of kStreamThreads, K vectors of N elements per thread. The functions are
/// called as operator()<N>(i, …) for whole vectors and operator()<1>(i, …) for the elements of the array's
/// end. Launch with stream_blocks<N, K>(count).
template <int N, int K, class Load, class Finish>
__device__ inline void stream_vectors(int64_t count, const Load& load, const Finish& finish) {
  const auto position = [](int k) { return first_element(blockIdx.x, threadIdx.x, kStreamThreads, k, K, N); };
  if (int64_t{blockIdx.x + 1} * (kStreamThreads * K * N) <= count) {
    decltype(load.template operator()<N>(int64_t{})) loaded[K];
#pragma unroll
    for (int k = 0; k < K; ++k) loaded[k] = load.template operator()<N>(position(k));
#pragma unroll
    for (int k = 0; k < K; ++k) finish.template operator()<N>(position(k), loaded[k]);
    return;
  }
#pragma unroll 1
  for (int k = 0; k < K; ++k) {
    int64_t i = position(k);
    if (i + N <= count) {
      finish.template operator()<N>(i, load.template operator()<N>(i));
      continue;
    }
    for (; i < count; ++i) finish.template operator()<1>(i, load.template operator()<1>(i));
  }
}

template <int N, int K>
unsigned stream_blocks(int64_t count) {
  return blocks_for(count, int64_t{kStreamThreads} * K * N);
}

/// Covers `rows` rows of vectors with blocks of kStreamThreads, K vectors per thread, without regard to where
/// rows end: any row length keeps every thread busy. The functions get a RowVector. Launch with
/// blocks_for(rows · vectors per row, kStreamThreads · K).
template <int K, class Load, class Finish>
__device__ inline void stream_rows(int64_t rows, const Divisor& per_row, const Load& load,
                                   const Finish& finish) {
  const int64_t first = int64_t{blockIdx.x} * (kStreamThreads * K);
  const RowVector origin = row_vector(first, per_row);
  const auto position = [&](int k) {
    return row_vector_after(origin, k * kStreamThreads + threadIdx.x, per_row);
  };
  if (first + kStreamThreads * K <= rows * per_row.value()) {
    decltype(load(RowVector{})) loaded[K];
#pragma unroll
    for (int k = 0; k < K; ++k) loaded[k] = load(position(k));
#pragma unroll
    for (int k = 0; k < K; ++k) finish(position(k), loaded[k]);
    return;
  }
#pragma unroll 1
  for (int k = 0; k < K; ++k)
    if (position(k).row < rows) finish(position(k), load(position(k)));
}

/// An array of elements of a size of its own.
struct ElementArray {
  const void* data;
  int64_t element_bytes;
};

/// How many elements, a power of two up to 16, one access may cover in every array at once, each access being
/// aligned and at most 16 bytes; `columns` is the length of their rows (0: flat). Null arrays are ignored.
inline int aligned_elements(std::initializer_list<ElementArray> arrays, int64_t columns = 0) {
  int64_t elements = 16;
  for (const ElementArray& array : arrays)
    if (array.data != nullptr)
      elements =
          std::min(elements, access_bytes({array.data}, columns * array.element_bytes) / array.element_bytes);
  return static_cast<int>(elements);
}

}  // namespace minillm::kernels
