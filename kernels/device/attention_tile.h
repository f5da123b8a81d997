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
#include <initializer_list>
#include <string>

#include "core/checked.h"
#include "core/error.h"
#include "kernels/attention.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {

inline constexpr int kAttentionThreads = 128;
/// Blocks of an SM: what shared memory admits. Without it the compiler may prefer spilling to fewer blocks.
inline constexpr int kAttentionBlocks = 2;
inline constexpr int kThreadColumns = 8;
inline constexpr int kThreadRows = kAttentionThreads / kThreadColumns;
inline constexpr int kGroupColumns = 4 * kThreadColumns;
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ inline int thread_row() {
  return static_cast<int>(threadIdx.x) / kThreadColumns;
}
__device__ inline int thread_column() {
  return static_cast<int>(threadIdx.x) % kThreadColumns;
}

/// The rows of one head in a tensor that holds all heads of a position side by side.
template <class T>
struct HeadRows {
  T* first;        ///< row 0
  int64_t stride;  ///< elements from one row to the next
  int columns;     ///< head size, a multiple of 8
  bool vectorize;  ///< every row starts on 16 bytes

  __device__ T* row(int64_t r) const { return first + r * stride; }
};

/// What all attention kernels are launched with.
struct AttentionLayout {
  int64_t batch;
  int sequence, heads, head_size;
  int tiles;  ///< blocks per head
  float scale;
  bool causal, vectorize;
};

/// The part of the grid that a block works on: grid.x is batch × heads × tiles, the only dimension of a grid
/// that cannot overflow.
struct BlockPosition {
  int64_t batch;
  int head, tile;
};
__device__ inline BlockPosition block_position(const AttentionLayout& layout) {
  const int sequence = static_cast<int>(blockIdx.x) / layout.tiles;
  return {sequence / layout.heads, sequence % layout.heads, static_cast<int>(blockIdx.x) % layout.tiles};
}

/// One of the three parts (0: q, 1: k, 2: v) of a packed [batch, sequence, 3, heads, head_size] tensor.
template <class T>
__device__ inline HeadRows<T> packed_rows(T* qkv, const AttentionLayout& layout, const BlockPosition& at,
                                          int part) {
  const int64_t width = int64_t{layout.heads} * layout.head_size;
  return {qkv + (at.batch * layout.sequence * 3 + part) * width + int64_t{at.head} * layout.head_size,
          3 * width, layout.head_size, layout.vectorize};
}

/// Rows of a [batch, sequence, heads, head_size] tensor.
template <class T>
__device__ inline HeadRows<T> plain_rows(T* x, const AttentionLayout& layout, const BlockPosition& at) {
  const int64_t width = int64_t{layout.heads} * layout.head_size;
  return {x + at.batch * layout.sequence * width + int64_t{at.head} * layout.head_size, width,
          layout.head_size, layout.vectorize};
}

/// Index of a head's first value in a [batch, heads, sequence] tensor.
__device__ inline int64_t statistics_offset(const AttentionLayout& layout, const BlockPosition& at) {
  return (at.batch * layout.heads + at.head) * layout.sequence;
}

/// 8 adjacent elements, 16 bytes at a time when `vectorize`.
template <class T>
__device__ inline Floats<8> load_eight(const T* from, bool vectorize) {
  constexpr int kWidth = kFullWidth<T>;
  Floats<8> result;
  if (vectorize) {
#pragma unroll
    for (int start = 0; start < 8; start += kWidth) {
      const Floats<kWidth> part = load<kWidth>(from + start);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) result[start + i] = part[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) result[i] = to_float(from[i]);
  }
  return result;
}

/// tile[r][c] = source row first + r. Columns beyond the head's are zero, and so are the rows after `rows` up
/// to a multiple of 4: as far as products read, so that they add nothing, whatever lay in memory.
template <int kRows, int kColumns, class T>
__device__ inline void load_tile(float (&tile)[kRows][kColumns], const HeadRows<const T>& source, int first,
                                 int rows) {
  constexpr int kChunks = kColumns / 8;
  const int chunks = static_cast<int>(round_up(rows, 4)) * kChunks;
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += static_cast<int>(blockDim.x)) {
    const int row = i / kChunks, column = i % kChunks * 8;
    Floats<8> values{};
    if (row < rows && column < source.columns)
      values = load_eight(source.row(int64_t{first} + row) + column, source.vectorize);
    float* to = &tile[row][column];
    store(to, Floats<4>{values[0], values[1], values[2], values[3]});
    store(to + 4, Floats<4>{values[4], values[5], values[6], values[7]});
  }
}

/// As load_tile, transposed: tile[c][r], all rows after `rows` zero. A warp takes 16 rows × 2 chunks: whole
/// 32-byte sectors of bf16 memory are read, and the stores of neighbouring rows go to neighbouring banks.
template <int kColumns, int kRows, class T>
__device__ inline void load_transposed(float (&tile)[kColumns][kRows], const HeadRows<const T>& source,
                                       int first, int rows) {
  constexpr int kRowGroups = kRows / 16;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumns / 8; i += static_cast<int>(blockDim.x)) {
    const int row = i % 16 + i / 32 % kRowGroups * 16;
    const int column = (i / 16 % 2 + i / 32 / kRowGroups * 2) * 8;
    if (column >= source.columns) continue;  // never read: products over columns end at the head size
    Floats<8> values{};
    if (row < rows) values = load_eight(source.row(int64_t{first} + row) + column, source.vectorize);
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

/// Writes `rows` rows of a product, row i times factor[i], rounded once.
template <int kRows, int kGroups, class T>
__device__ inline void store_tile(const HeadRows<T>& target, int first, int rows,
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
      T* to = target.row(int64_t{first} + row) + column_of(g);
      if (target.vectorize) {
        store(to, values);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = from_float<T>(values[j]);
      }
    }
  }
}

/// Checks a shape and lays out a grid of one block per `tile_rows` rows of each head.
inline AttentionLayout attention_layout(const AttentionShape& s, int tile_rows,
                                        std::initializer_list<const void*> io) {
  if (s.head_size < 8 || s.head_size > 128 || s.head_size % 8 != 0)
    throw UsageError(
        "attention: head size " + std::to_string(s.head_size) +
        " is not supported; choose model.dim and model.n_heads so that dim / n_heads is a multiple of 8 "
        "from 8 to 128");
  return {
      s.batch, s.sequence, s.heads,          s.head_size, static_cast<int>(ceil_div(s.sequence, tile_rows)),
      s.scale, s.causal,   can_vectorize(io)};
}

/// Threads of a block: no more than the rows of a sequence shorter than a tile can occupy.
inline unsigned attention_threads(const AttentionLayout& layout, int rows_per_thread) {
  const int64_t threads = ceil_div(layout.sequence, rows_per_thread) * kThreadColumns;
  return static_cast<unsigned>(std::min<int64_t>(round_up(threads, 32), kAttentionThreads));
}

inline dim3 attention_grid(const AttentionLayout& layout) {
  return dim3(static_cast<unsigned>(narrow<int32_t>(layout.batch * layout.heads * layout.tiles)));
}

/// Calls body.operator()<T, D>() with the element type and the head size rounded up to a compiled one.
template <class Body>
void dispatch_attention(const AttentionShape& shape, const Body& body) {
  dispatch(shape.dtype, [&]<class T>() {
    if (shape.head_size <= 32)
      body.template operator()<T, 32>();
    else if (shape.head_size <= 64)
      body.template operator()<T, 64>();
    else
      body.template operator()<T, 128>();
  });
}

/// Pairs of a query and a key that it attends to, over the whole batch and all heads.
inline int64_t attention_pairs(const AttentionShape& s) {
  const int64_t t = s.sequence;
  return s.batch * s.heads * (s.causal ? t * (t + 1) / 2 : t * t);
}

}  // namespace minillm::kernels
