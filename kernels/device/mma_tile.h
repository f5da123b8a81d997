// Tiles of bf16 in shared memory and their products on tensor cores, a warp's 16 rows at a time.
//
// A tile has rows of D elements in chunks of 8 (16 bytes). Chunk c of row r lies at place c ^ s(r) of its
// row, so that the same chunk of 8 adjacent rows, which is what ldmatrix reads at once, covers all 32 banks.
// All tiles start on 128 bytes. s(r) depends on r % 8 only: a lane's place in one 16 × 16 block is its place
// in every other but for a constant, added for rows and exclusive-ored for columns.
//
// In what follows a "row block" is a warp's 16 rows of a product as D fragments of multiply_add: sum[j][0..1]
// are columns 8j + pair, + 1 of row `fragment_row()`, sum[j][2..3] of row `fragment_row() + 8`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/device/at_once.h"
#include "kernels/device/attention_layout.h"
#include "kernels/device/ptx.h"
#include "kernels/device/reduce.h"

namespace minillm::kernels {

using Bf16 = __nv_bfloat16;

__device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x) % 32;
}
/// Shuffled so that the compiler knows it to be the same in all lanes of a warp.
__device__ inline int warp_index() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
}
/// The first of the two rows of a row block of which this lane holds elements; and the first of the two
/// columns of each 8.
__device__ inline int fragment_row() {
  return lane_index() / 4;
}
__device__ inline int fragment_pair() {
  return lane_index() % 4 * 2;
}

/// Element offset of a chunk in a tile.
template <int D>
__device__ inline int chunk_offset(int row, int chunk) {
  static_assert(D == 32 || D % 64 == 0);
  const int swizzle = D == 32 ? row / 2 % 4 : row % 8;
  return row * D + ((chunk ^ swizzle) * 8);
}

/// Where a lane reads 16 × 16 blocks of a tile with ldmatrix: as an A operand, or, transposed, as a B operand
/// whose rows are the product's inner dimension.
template <int D>
__device__ inline int row_lane_offset() {
  return chunk_offset<D>(lane_index() % 16, lane_index() / 16);
}
/// As a B operand whose rows are the product's columns.
template <int D>
__device__ inline int column_lane_offset() {
  return chunk_offset<D>(lane_index() % 8 + lane_index() / 16 * 8, lane_index() / 8 % 2);
}

/// The A fragment of 16 rows, columns 16k..16k+15, of a tile; lane is row_lane_offset(), plus D times a
/// multiple of 16 for later rows than the first.
template <int D>
__device__ inline void load_fragment(uint32_t (&fragment)[4], const Bf16* tile, int lane, int k) {
  load_matrices<4>(fragment, tile + (lane ^ k * 16));
}

/// product[r] = A_r · Bᵀ for kBlocks row blocks: A_r is 16 rows of D elements, of which load(fragment, r, k)
/// loads columns 16k..16k+15; B is the first kColumns rows of a tile; lane is column_lane_offset().
template <int D, int kColumns, int kBlocks, class Load>
__device__ inline void product_with_rows(float (&product)[kBlocks][kColumns / 8][4], const Load& load,
                                         const Bf16* tile, int lane) {
  if (meets_at_once()) {
    uint32_t a[D / 16][kBlocks][4];
    for (int k = 0; k < D / 16; ++k)
      for (int r = 0; r < kBlocks; ++r) load(a[k][r], r, k);
    memset(product, 0, sizeof product);
    return multiply_tile<D, D / 16, kColumns, kBlocks, false>(product[0][0], a[0][0], tile, lane);
  }
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[kBlocks][4];
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) load(a[r], r, k);
#pragma unroll
    for (int j = 0; j < kColumns; j += 16) {
      uint32_t b[4];
      load_matrices<4>(b, tile + (lane ^ k * 16) + j * D);
      multiply_add(product, j / 8, a, b, k == 0);
    }
  }
}

/// sum[r] += A_r · B: A_r is 16 kSteps columns as fragments a[·][r], B as many rows of a tile; lane is
/// row_lane_offset().
template <int D, int kSteps, int kBlocks>
__device__ inline void add_product_with_columns(float (&sum)[kBlocks][D / 8][4],
                                                const uint32_t (&a)[kSteps][kBlocks][4], const Bf16* tile,
                                                int lane) {
  if (meets_at_once()) return multiply_tile<D, kSteps, D, kBlocks, true>(sum[0][0], a[0][0], tile, lane);
#pragma unroll
  for (int j = 0; j < D; j += 16) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t b[4];
      load_matrices<4, true>(b, tile + k * 16 * D + (lane ^ j));
      multiply_add(sum, j / 8, a[k], b, false);
    }
  }
}

/// The row blocks' columns, rounded to bf16, as A fragments of 16 columns each.
template <int kTiles, int kBlocks>
__device__ inline void pack_fragments(uint32_t (&fragment)[kTiles / 2][kBlocks][4],
                                      const float (&block)[kBlocks][kTiles][4]) {
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k)
#pragma unroll
    for (int r = 0; r < kBlocks; ++r)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        fragment[k][r][i] =
            pack_bf16(block[r][2 * k + i / 2][i % 2 * 2], block[r][2 * k + i / 2][i % 2 * 2 + 1]);
}

/// Starts the copy of rows first..first+kRows-1 of a head to a tile, zeros for rows from `end` on and for
/// columns beyond the head's. kThreads threads take part, the whole block; `thread` is threadIdx.x.
template <int D, int kRows, int kThreads>
__device__ inline void copy_rows(Bf16* tile, const HeadRows<const Bf16>& source, int first, int end,
                                 int thread) {
  constexpr int kChunks = D / 8, kStep = kThreads / kChunks;
  static_assert(kStep % 8 == 0 && kRows % kStep == 0);
  const int chunk = thread % kChunks, row = thread / kChunks;
  Bf16* const to = tile + chunk_offset<D>(row, chunk);
  const Bf16* from = source.row(first + row) + chunk * 8;
  const int rows =
      chunk * 8 < source.columns ? end - first - row : 0;  // that exist from this thread's first on
#pragma unroll
  for (int step = 0; step < kRows; step += kStep, from += kStep * source.stride)
    copy_async<16>(to + step * D, from, step < rows);
}

/// Writes the row block `block`, row i of this lane times factor[i], to rows first.. of a head that are
/// before `end`, by way of this warp's 16 rows of shared memory at `staging`, which no other warp uses.
template <int D>
__device__ inline void store_rows(const HeadRows<Bf16>& target, int first, int end,
                                  const float (&block)[D / 8][4], const float (&factor)[2], Bf16* staging) {
  __syncwarp();  // all lanes have read what the rows held
#pragma unroll
  for (int j = 0; j < D / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Bf16* const to = staging + chunk_offset<D>(fragment_row() + 8 * half, j) + fragment_pair();
      store(to, Floats<2>{block[j][2 * half] * factor[half], block[j][2 * half + 1] * factor[half]});
    }
  __syncwarp();
  constexpr int kChunks = D / 8, kStep = 32 / kChunks;
  const int chunk = lane_index() % kChunks;
  if (chunk * 8 >= target.columns) return;
#pragma unroll
  for (int row = lane_index() / kChunks; row < 16; row += kStep) {
    if (first + row >= end) break;
    Bf16* const to = target.row(first + row) + chunk * 8;
    store_packed(to, load_packed<8>(staging + chunk_offset<D>(row, chunk)));
  }
}

}  // namespace minillm::kernels
