#include "kernels/bias_gradient.h"

#include <algorithm>

#include "core/checked.h"
#include "kernels/device/column_sum.h"
#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kWarps = 8;

/// A range of rows gives one row of partial sums. Long enough that partials are small beside dy (1 in 64 of
/// its bytes or fewer), many enough to fill a GPU when columns are few.
constexpr int64_t kRowsPerRange = 128, kMaxRanges = 256;

int ranges_of(int64_t rows) {
  return static_cast<int>(std::min(kMaxRanges, ceil_div(rows, kRowsPerRange)));
}

/// Block (tile of 32·N columns, range of rows); its warps take the range's rows in turn.
template <class T, int N>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    bias_gradient_kernel(float* partials, const T* dy, int64_t rows, int columns) {
  struct Shared {
    float of_warp[kWarps][N][kWarpSize];
  };
  Shared& s = shared<Shared>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t column = (int64_t{blockIdx.x} * kWarpSize + lane) * N;
  const int64_t rows_per_range = (rows + gridDim.y - 1) / gridDim.y;
  const int64_t first = blockIdx.y * rows_per_range;
  const int64_t last = first + rows_per_range < rows ? first + rows_per_range : rows;
  Floats<N> total{};
  if (column < columns) {
#pragma unroll 4
    for (int64_t row = first + warp; row < last; row += kWarps) {
      const Floats<N> v = load<N>(dy + row * columns + column);
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] += v[k];
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) s.of_warp[warp][k][lane] = total[k];
  __syncthreads();
  if (warp >= N || column + warp >= columns) return;
  // Of the tile's 32·N sums each warp finishes one of every N.
  float sum = 0;
#pragma unroll
  for (int from = 0; from < kWarps; ++from) sum += s.of_warp[from][warp][lane];
  partials[int64_t{blockIdx.y} * columns + column + warp] = sum;
}
static_assert(kWarps >= kFullWidth<__nv_bfloat16>, "a warp for each element of a vector");

}  // namespace

void bias_gradient(const BiasGradient& a, cudaStream_t stream) {
  const int ranges = ranges_of(a.rows);
  dispatch(a.dtype, can_vectorize({a.dy}, a.columns * size_of(a.dtype)), [&]<class T, int N>() {
    launch("bias_gradient", bias_gradient_kernel<T, N>,
           {.grid = dim3(static_cast<unsigned>(ceil_div(a.columns, kWarpSize * N)), ranges),
            .block = kWarps * kWarpSize,
            .stream = stream},
           a.scratch, static_cast<const T*>(a.dy), a.rows, a.columns);
  });
  column_sum("bias_gradient_sum", a.dbias, a.scratch, ranges, a.columns, stream);
}

int64_t bias_gradient_scratch(int64_t rows, int columns) {
  return ranges_of(rows) * int64_t{columns} * static_cast<int64_t>(sizeof(float));
}

Cost bias_gradient_cost(int64_t rows, int columns, DType dtype) {
  return {.bytes = rows * columns * size_of(dtype) + columns * int64_t{4}, .flops = rows * columns};
}

}  // namespace minillm::kernels
