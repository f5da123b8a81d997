#include "kernels/bias_gradient.h"

#include <algorithm>
#include <bit>

#include "core/checked.h"
#include "kernels/device/column_sum.h"
#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 8;  // of a thread in flight

/// A range of rows gives one row of partial sums. Long enough that partials are small beside dy, many enough
/// that ranges times tiles of columns fill any GPU; a function of the shape only.
constexpr int64_t kRowsPerRange = 128, kTileColumns = 256, kBlocks = 2048, kMinRanges = 8;

int ranges_of(int64_t rows, int columns) {
  const int64_t wanted =
      std::max(kMinRanges, kBlocks / std::max<int64_t>(1, ceil_div(columns, kTileColumns)));
  return static_cast<int>(std::min(wanted, ceil_div(rows, kRowsPerRange)));
}

/// Block (tile of blockDim.x · N columns, range of rows). The threads of a column take the range's rows in
/// turn; their sums are added as a tree.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, 4)
    bias_gradient_kernel(float* partials, const T* dy, int64_t rows, int columns) {
  struct Shared {
    float sums[kThreads * N];  // [row of threads][element of the vector][thread in the row]
  };
  Shared& s = shared<Shared>();
  const int across = static_cast<int>(blockDim.x), step = static_cast<int>(blockDim.y);
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const int64_t column = (int64_t{blockIdx.x} * across + x) * N;
  const int64_t rows_per_range = (rows + gridDim.y - 1) / gridDim.y;
  const int64_t first = blockIdx.y * rows_per_range;
  const int64_t last = first + rows_per_range < rows ? first + rows_per_range : rows;
  Floats<N> total{};
  if (column < columns) {
    const T* from = dy + (first + y) * columns + column;
    const int64_t stride = int64_t{step} * columns;
    int64_t row = first + y;
    for (; row + (kLoads - 1) * step < last; row += kLoads * step, from += kLoads * stride) {
      Packed<T, N> loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) loaded[i] = load_packed<N>(from + i * stride);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const Floats<N> v = loaded[i].floats();
#pragma unroll
        for (int k = 0; k < N; ++k) total[k] += v[k];
      }
    }
    for (; row < last; row += step, from += stride) {
      const Floats<N> v = load<N>(from);
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] += v[k];
    }
  }
  const auto sum_of = [&](int thread_row, int k) -> float& {
    return s.sums[(thread_row * N + k) * across + x];
  };
#pragma unroll
  for (int k = 0; k < N; ++k) sum_of(y, k) = total[k];
  for (int half = step / 2; half > 0; half /= 2) {
    __syncthreads();
    if (y >= half) continue;
#pragma unroll
    for (int k = 0; k < N; ++k) sum_of(y, k) += sum_of(y + half, k);
  }
  if (y != 0 || column >= columns) return;
#pragma unroll
  for (int k = 0; k < N; ++k) partials[int64_t{blockIdx.y} * columns + column + k] = sum_of(0, k);
}

}  // namespace

void bias_gradient(const BiasGradient& a, cudaStream_t stream) {
  const int ranges = ranges_of(a.rows, a.columns);
  dispatch(a.dtype, access_bytes({a.dy}, a.columns * size_of(a.dtype)), [&]<class T, int N>() {
    // Narrow matrices: several rows side by side in a warp, so that no lane is idle.
    const unsigned across =
        std::bit_ceil(static_cast<unsigned>(std::clamp<int64_t>(a.columns / N, 1, kWarpSize)));
    launch("bias_gradient", bias_gradient_kernel<T, N>,
           {.grid = dim3(static_cast<unsigned>(ceil_div(a.columns, int64_t{across} * N)), ranges),
            .block = dim3(across, kThreads / across),
            .stream = stream},
           a.scratch, static_cast<const T*>(a.dy), a.rows, a.columns);
  });
  column_sum("bias_gradient_sum", a.dbias, a.scratch, ranges, a.columns, a.accumulate, stream);
}

int64_t bias_gradient_scratch(int64_t rows, int columns) {
  return ranges_of(rows, columns) * int64_t{columns} * static_cast<int64_t>(sizeof(float));
}

Cost bias_gradient_cost(int64_t rows, int columns, DType dtype, bool accumulate) {
  return {.bytes = rows * columns * size_of(dtype) + columns * int64_t{accumulate ? 8 : 4},
          .flops = (rows + (accumulate ? 1 : 0)) * columns,
          .extra_bytes = 2 * bias_gradient_scratch(rows, columns)};
}

}  // namespace minillm::kernels
