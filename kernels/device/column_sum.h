// The second half of a deterministic column sum: adds the rows of a small matrix of fp32 partial sums.
#pragma once

#include <cstdint>

#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"
#include "kernels/device/shared.h"

namespace minillm::kernels {

/// A block is 32 columns wide and cuts the rows into kPieces contiguous pieces, one per warp, so that the
/// latency of reading a column is paid for a piece only. Pieces are added in order.
template <int kPieces>
__global__ void __launch_bounds__(kWarpSize* kPieces)
    column_sum_kernel(float* out, const float* partials, int rows, int columns, bool accumulate) {
  struct Shared {
    float of_piece[kPieces][kWarpSize];
  };
  Shared& s = shared<Shared>();
  const int lane = threadIdx.x % kWarpSize, piece = threadIdx.x / kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarpSize + lane;
  const int length = (rows + kPieces - 1) / kPieces;
  const int first = piece * length, last = min(first + length, rows);
  float total = 0;
  if (column < columns) {
#pragma unroll 8
    for (int row = first; row < last; ++row) total += partials[int64_t{row} * columns + column];
  }
  s.of_piece[piece][lane] = total;
  __syncthreads();
  if (piece != 0 || column >= columns) return;
#pragma unroll
  for (int other = 1; other < kPieces; ++other) total += s.of_piece[other][lane];
  out[column] = accumulate ? out[column] + total : total;
}

template <int kPieces>
void launch_column_sum(const char* name, float* out, const float* partials, int rows, int columns,
                       bool accumulate, cudaStream_t stream) {
  launch(name, column_sum_kernel<kPieces>,
         {.grid = static_cast<unsigned>((columns + kWarpSize - 1) / kWarpSize),
          .block = kWarpSize * kPieces,
          .stream = stream},
         out, partials, rows, columns, accumulate);
}

/// out[c] = (accumulate ? out[c] : 0) + sum of partials[r, c] over the rows r, in an order that depends on
/// `rows` only: the sum is finished before it is added. No aliasing.
inline void column_sum(const char* name, float* out, const float* partials, int rows, int columns,
                       bool accumulate, cudaStream_t stream) {
  constexpr int kManyRows = 256;  // which take longer to read one after the other than more warps to start
  if (rows <= kManyRows)
    launch_column_sum<8>(name, out, partials, rows, columns, accumulate, stream);
  else
    launch_column_sum<32>(name, out, partials, rows, columns, accumulate, stream);
}

}  // namespace minillm::kernels
