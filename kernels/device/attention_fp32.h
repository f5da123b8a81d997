// Building blocks of the attention kernels that compute in fp32 on CUDA cores: tiles of one head in shared
// memory and the products of two tiles with a register tile per thread.
//
// A block is up to 128 threads in up to 16 rows of 8 (`thread_row`, `thread_column`). A thread owns kRows
// adjacent rows of a product and, in each group of 32 columns, 4 adjacent columns: every shared access is 16
// bytes, the 8 threads of a row read 128 contiguous bytes or one address, so nothing conflicts and no tile
// needs padding.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/checked.h"
#include "kernels/device/attention_layout.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {

inline constexpr int kAttentionThreads = 128;
/// Blocks of an SM: what shared memory admits. Without it the compiler may prefer spilling to fewer blocks.
inline constexpr int kAttentionBlocks = 2;
inline constexpr int kThreadColumns = 8;
inline constexpr int kThreadRows = kAttentionThreads / kThreadColumns;
inline constexpr int kGroupColumns = 4 * kThreadColumns;

__device__ inline int thread_row() {
  return static_cast<int>(threadIdx.x) / kThreadColumns;
}
__device__ inline int thread_column() {
  return static_cast<int>(threadIdx.x) % kThreadColumns;
}

/// tile[r][c] = source row first + r. Columns beyond the head's are zero, and so are the rows after `rows` up
/// to a multiple of 4: as far as products read, so that they add nothing, whatever lay in memory.
template <int kRows, int kColumns>
__device__ inline void load_tile(float (&tile)[kRows][kColumns], const HeadRows<const float>& source,
                                 int first, int rows) {
  constexpr int kChunks = kColumns / 8;
  const int chunks = static_cast<int>(round_up(rows, 4)) * kChunks;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) {
    const int row = i / kChunks, column = i % kChunks * 8;
    Floats<8> values{};
    if (row < rows && column < source.columns) values = load_eight(source.row(first + row) + column);
    float* to = &tile[row][column];
    store(to, Floats<4>{values[0], values[1], values[2], values[3]});
    store(to + 4, Floats<4>{values[4], values[5], values[6], values[7]});
  }
}

/// As load_tile, transposed: tile[c][r], all rows after `rows` zero. A warp takes 16 rows × 2 chunks: the
/// stores of neighbouring rows go to neighbouring banks.
template <int kColumns, int kRows>
__device__ inline void load_transposed(float (&tile)[kColumns][kRows], const HeadRows<const float>& source,
                                       int first, int rows) {
  constexpr int kRowGroups = kRows / 16;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumns / 8; i += static_cast<int>(blockDim.x)) {
    const int row = i % 16 + i / 32 % kRowGroups * 16;
    const int column = (i / 16 % 2 + i / 32 / kRowGroups * 2) * 8;
    if (column >= source.columns) continue;  // never read: products over columns end at the head size
    Floats<8> values{};
    if (row < rows) values = load_eight(source.row(first + row) + column);
#pragma unroll
    for (int c = 0; c < 8; ++c) tile[column + c][row] = values[c];
  }
}

/// A thread's part of a product: value[i][g][j] is row thread_row() * kRows + i, column column_of(g) + j.
template <int kRows, int kGroups>
struct RegisterTile {
  float value[kRows][kGroups][4];
};
__device__ inline int column_of(int group) {
  return group * kGroupColumns + thread_column() * 4;
}

/// sum += A · B over `depth` (a multiple of 4); A is [rows][depth], B is [depth][columns], both whole tiles.
template <int kRows, int kGroups, int kStrideA, int kStrideB>
__device__ inline void add_product(RegisterTile<kRows, kGroups>& sum, const float* tile_a,
                                   const float* tile_b, int depth) {
  const float* a = tile_a + thread_row() * kRows * kStrideA;
  const float* b = tile_b + column_of(0);
#pragma unroll 1
  for (int k = 0; k < depth; k += 4) {
    Floats<4> left[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = load<4>(a + i * kStrideA + k);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const Floats<4> right = load<4>(b + (k + kk) * kStrideB + g * kGroupColumns);
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum.value[i][g][j] += left[i][kk] * right[j];
      }
    }
  }
}

/// sum += Aᵀ · B over `depth`; A is [depth][rows], B is [depth][columns], both whole tiles.
template <int kRows, int kGroups, int kStrideA, int kStrideB>
__device__ inline void add_transposed_product(RegisterTile<kRows, kGroups>& sum, const float* tile_a,
                                              const float* tile_b, int depth) {
  const float* a = tile_a + thread_row() * kRows;
  const float* b = tile_b + column_of(0);
#pragma unroll 2
  for (int k = 0; k < depth; ++k) {
    const Floats<kRows> left = load<kRows>(a + k * kStrideA);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const Floats<4> right = load<4>(b + k * kStrideB + g * kGroupColumns);
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.value[i][g][j] += left[i] * right[j];
    }
  }
}

/// Writes `rows` rows of a product, row i times factor[i].
template <int kRows, int kGroups>
__device__ inline void store_tile(const HeadRows<float>& target, int first, int rows,
                                  const RegisterTile<kRows, kGroups>& tile, const Floats<kRows>& factor) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = thread_row() * kRows + i;
    if (row >= rows) continue;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (column_of(g) >= target.columns) continue;
      Floats<4> values;
#pragma unroll
      for (int j = 0; j < 4; ++j) values[j] = tile.value[i][g][j] * factor[i];
      store(target.row(first + row) + column_of(g), values);
    }
  }
}

/// Threads of a block: no more than the rows of a sequence shorter than a tile can occupy.
inline unsigned attention_threads(const AttentionLayout& layout, int rows_per_thread) {
  const int64_t threads = ceil_div(layout.sequence, rows_per_thread) * kThreadColumns;
  return static_cast<unsigned>(std::min<int64_t>(round_up(threads, 32), kAttentionThreads));
}

}  // namespace minillm::kernels
