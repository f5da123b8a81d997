// A fixed number of blocks share the rows; each adds the weight gradient of its rows in registers and leaves
// one row of partial sums, which a second kernel adds in order.
#include <algorithm>

#include "core/checked.h"
#include "kernels/device/column_sum.h"
#include "kernels/device/launch.h"
#include "kernels/device/ptx.h"
#include "kernels/device/reduce.h"
#include "kernels/device/resident_row.h"
#include "kernels/device/row_offset.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"
#include "kernels/rmsnorm.h"

namespace minillm::kernels {
namespace {

/// Blocks: two for each multiprocessor of an H100, and rows enough for each that partial sums stay below a
/// tenth of the traffic. Fixed, so that sums do not depend on the GPU.
constexpr int64_t kMaxBlocks = 264, kMinRows = 16;

int backward_blocks(int64_t rows) {
  return static_cast<int>(std::min(kMaxBlocks, ceil_div(rows, kMinRows)));
}

template <class T>
struct BackwardTensors {
  T* dx;
  const T* dy;
  const T* x;
  const float* rstd;
  const T* residual;
  float* partials;  ///< [blocks, columns]
  int64_t rows;
  int columns;
};

/// Rows of a block: [first, last), an even share.
struct RowRange {
  int64_t first, last;
  __device__ explicit RowRange(int64_t rows)
      : first(blockIdx.x * rows / gridDim.x), last((blockIdx.x + int64_t{1}) * rows / gridDim.x) {}
};

/// dy · x̂ for x̂ = x · rstd.
template <int N>
__device__ Floats<N> weight_gradient(const Floats<N>& dy, const Floats<N>& x, float rstd) {
  Floats<N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = dy[i] * (x[i] * rstd);
  return result;
}

template <int N>
__device__ float dot(const Floats<N>& a, const Floats<N>& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += a[i] * b[i];
  return sum;
}

/// dx = (dy·w - x̂·mean) · rstd, with mean = mean of dy·w·x̂ over the row.
template <int N>
__device__ Floats<N> input_gradient(const Floats<N>& dy, const Floats<N>& w, const Floats<N>& x, float rstd,
                                    float mean) {
  Floats<N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) result[i] = (dy[i] * w[i] - x[i] * rstd * mean) * rstd;
  return result;
}

template <class T, int N>
struct Pair {
  Packed<T, N> x, dy;
};

/// This thread's vectors of a row that fits the registers of a block. Words: see resident_row.h.
template <class T, int N, int K>
struct RowPart {
  Words<Packed<T, N>> x[K], dy[K];
  float rstd;

  /// Rows from `last` on are zero.
  __device__ void read(const BackwardTensors<T>& a, int64_t row, int64_t last) {
    rstd = row < last ? a.rstd[row] : 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      x[k] = dy[k] = {};
      if (row >= last || column(k) >= a.columns) continue;
      x[k] = to_words(load_packed<N>(a.x + row_offset(row, a.columns) + column(k)));
      dy[k] = to_words(load_packed<N>(a.dy + row_offset(row, a.columns) + column(k)));
    }
  }
  __device__ Floats<N> x_floats(int k) const {
    return from_words(x[k]).floats();
  }
  __device__ Floats<N> dy_floats(int k) const {
    return from_words(dy[k]).floats();
  }
  __device__ static int column(int k) {
    return (k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
  }
};

/// Adds the weight gradients of a block's threads with the same columns, in the order of threadIdx.y, each
/// handing its sum to the next through `relay`, and writes the total to `partial`.
template <int N, int K>
__device__ void write_weight_gradient(float* partial, float* relay, Floats<N> (&sum)[K], int columns) {
  const int y = static_cast<int>(threadIdx.y), last = static_cast<int>(blockDim.y) - 1;
  for (int turn = 0; turn <= last; ++turn) {
    if (turn > 0) __syncthreads();
    if (turn != y) continue;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int column = RowPart<float, 1, K>::column(k) * N;
      if (column >= columns) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float* const handed = relay + (k * N + i) * blockDim.x + threadIdx.x;
        if (y > 0) sum[k][i] += *handed;
        if (y < last) *handed = sum[k][i];
      }
      if (y < last) continue;
      if constexpr (N >= 4) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
          store(partial + column + i, Floats<4>{sum[k][i], sum[k][i + 1], sum[k][i + 2], sum[k][i + 3]});
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) partial[column + i] = sum[k][i];
      }
    }
  }
}

constexpr int kShortThreads = 256, kMaxShortThreads = 512;

/// Rows that fit the registers of 512 threads. kAhead: the next row is loaded while this one is reduced,
/// which keeps the memory busy with few blocks.
template <class T, int N, int K, bool kAhead>
__global__ void __launch_bounds__(kMaxShortThreads, 1)
    rmsnorm_backward_kernel(BackwardTensors<T> a, const T* __restrict__ weight) {
  const RowRange range(a.rows);
  Floats<N> dweight[K] = {};
  RowPart<T, N, K> now, next;
  if (kAhead) now.read(a, range.first + threadIdx.y, range.last);
  // Threads without a row stay in the loop: they meet the others in block_sum.
  for (int64_t base = range.first; base < range.last; base += blockDim.y) {
    const int64_t row = base + threadIdx.y, offset = row_offset(row, a.columns);
    if constexpr (kAhead)
      next.read(a, row + blockDim.y, range.last);
    else
      now.read(a, row, range.last);
    Words<Packed<T, N>> residual[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      residual[k] = {};
      if (a.residual != nullptr && row < range.last && now.column(k) < a.columns)
        residual[k] = to_words(load_packed<N>(a.residual + offset + now.column(k)));
    }
    float mine = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (now.column(k) >= a.columns) continue;
      const Floats<N> product = weight_gradient(now.dy_floats(k), now.x_floats(k), now.rstd);
#pragma unroll
      for (int i = 0; i < N; ++i) dweight[k][i] += product[i];
      mine += dot(product, load<N>(weight + now.column(k)));
    }
    const float mean = block_sum(mine, shared<ReduceStorage>()) / static_cast<float>(a.columns);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (row >= range.last || now.column(k) >= a.columns) continue;
      Floats<N> dx =
          input_gradient(now.dy_floats(k), load<N>(weight + now.column(k)), now.x_floats(k), now.rstd, mean);
      if (a.residual != nullptr) {
        const Floats<N> added = from_words(residual[k]).floats();
#pragma unroll
        for (int i = 0; i < N; ++i) dx[i] += added[i];
      }
      store(a.dx + offset + now.column(k), dx);
    }
    if constexpr (kAhead) now = next;
  }
  write_weight_gradient(a.partials + row_offset(blockIdx.x, a.columns), dynamic_shared<float>(), dweight,
                        a.columns);
}

constexpr int kLongThreads = 1024, kLongSlots = 2;

/// to[i] += product[i], or = for the `first` row; as wide as the partials, aligned as the tensors, allow.
template <int N>
__device__ void add_to_partial(float* to, const Floats<N>& product, bool first) {
  constexpr int kWidth = N % 4 == 0 ? 4 : 1;
#pragma unroll
  for (int start = 0; start < N; start += kWidth) {
    Floats<kWidth> sum = first ? Floats<kWidth>{} : load<kWidth>(to + start);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += product[start + i];
    store(to + start, sum);
  }
}

/// Longer rows: x and dy stay in registers and shared memory as far as they fit; the weight gradient is added
/// in this block's row of partial sums, where no other thread touches this thread's columns.
template <class T, int N>
__global__ void __launch_bounds__(kLongThreads, 1)
    rmsnorm_backward_long_kernel(BackwardTensors<T> a, const T* __restrict__ weight, int shared_slots) {
  float* const partial = a.partials + row_offset(blockIdx.x, a.columns);
  const RowRange range(a.rows);
  for (int64_t row = range.first; row < range.last; ++row) {
    const int64_t offset = row_offset(row, a.columns);
    const float rstd = a.rstd[row];
    const auto load_pair = [&](int vector) {
      return Pair<T, N>{load_packed<N>(a.x + offset + vector * N),
                        load_packed<N>(a.dy + offset + vector * N)};
    };
    ResidentRow<Pair<T, N>, kLongSlots> pairs(a.columns / N, dynamic_shared<Pair<T, N>>(), shared_slots);
    float mine = 0;
    pairs.read(0, load_pair, [&] {
#pragma unroll
      for (int k = 0; k < kLongSlots; ++k) {
        if (!pairs.exists(k)) continue;
        const int column = pairs.vector(k) * N;
        const Pair<T, N> pair = pairs[k];
        const Floats<N> product = weight_gradient(pair.dy.floats(), pair.x.floats(), rstd);
        add_to_partial(partial + column, product, row == range.first);
        mine += dot(product, load<N>(weight + column));
      }
    });
    const float mean = block_sum(mine, shared<ReduceStorage>()) / static_cast<float>(a.columns);
    pairs.read_again(load_pair, [&] {
#pragma unroll
      for (int k = 0; k < kLongSlots; ++k) {
        if (!pairs.exists(k)) continue;
        const int column = pairs.vector(k) * N;
        const Pair<T, N> pair = pairs[k];
        Floats<N> dx =
            input_gradient(pair.dy.floats(), load<N>(weight + column), pair.x.floats(), rstd, mean);
        if (a.residual != nullptr) {
          const Floats<N> added = load<N>(a.residual + offset + column);
#pragma unroll
          for (int i = 0; i < N; ++i) dx[i] += added[i];
        }
        store_streaming(a.dx + offset + column, pack<T>(dx));  // a store that stays one access
      }
    });
  }
}

RowResidence long_residence(int64_t vectors, int64_t vector_bytes) {
  return {.threads = kLongThreads,
          .registers = kLongSlots,
          .vector_bytes = static_cast<int>(2 * vector_bytes),
          .vectors = vectors,
          .shared_limit = kSharedOfBlock};
}

template <class T, int N, int K, bool kAhead>
void launch_short(const BackwardTensors<T>& a, const T* weight, int blocks, cudaStream_t stream) {
  const int threads = static_cast<int>(threads_to_hold(a.columns / N, K));
  const int rows_of_block = std::max(kShortThreads / threads, 1);
  launch("rmsnorm_backward", rmsnorm_backward_kernel<T, N, K, kAhead>,
         {.grid = static_cast<unsigned>(blocks),
          .block = dim3(static_cast<unsigned>(threads), static_cast<unsigned>(rows_of_block)),
          .shared_bytes = rows_of_block > 1 ? sizeof(float) * K * N * threads : 0,
          .stream = stream},
         a, weight);
}

constexpr int kShortSlots = 2, kMaxShortSlots = 4;
bool is_long(int64_t vectors) {
  return vectors > kMaxShortSlots * kMaxShortThreads;
}

}  // namespace

void rmsnorm_backward(const RmsNormBackward& a, cudaStream_t stream) {
  const int blocks = backward_blocks(a.rows);
  const int access =
      access_bytes({a.dx, a.dy, a.x, a.weight, a.residual, a.scratch}, a.columns * size_of(a.dtype));
  dispatch(a.dtype, access, [&]<class T, int N>() {
    const BackwardTensors<T> tensors = {.dx = static_cast<T*>(a.dx),
                                        .dy = static_cast<const T*>(a.dy),
                                        .x = static_cast<const T*>(a.x),
                                        .rstd = a.rstd,
                                        .residual = static_cast<const T*>(a.residual),
                                        .partials = a.scratch,
                                        .rows = a.rows,
                                        .columns = a.columns};
    const T* const weight = static_cast<const T*>(a.weight);
    const int64_t vectors = a.columns / N;
    if (vectors <= kShortSlots * kMaxShortThreads)
      return launch_short<T, N, kShortSlots, true>(tensors, weight, blocks, stream);
    if (!is_long(vectors)) return launch_short<T, N, kMaxShortSlots, false>(tensors, weight, blocks, stream);
    const RowResidence r = long_residence(vectors, sizeof(T) * N);
    launch("rmsnorm_backward", rmsnorm_backward_long_kernel<T, N>,
           {.grid = static_cast<unsigned>(blocks),
            .block = kLongThreads,
            .shared_bytes = r.shared_bytes(),
            .stream = stream},
           tensors, weight, r.shared_slots());
  });
  column_sum("rmsnorm_backward_dweight", a.dweight, a.scratch, blocks, a.columns, a.accumulate, stream);
}

int64_t rmsnorm_backward_scratch(int64_t rows, int columns) {
  return row_offset(backward_blocks(rows), columns) * static_cast<int64_t>(sizeof(float));
}

Cost rmsnorm_backward_cost(int64_t rows, int columns, bool residual, DType dtype, bool accumulate) {
  const int64_t tensors = residual ? 4 : 3, vectors = ceil_div(columns, 16 / size_of(dtype));
  Cost cost = {.bytes = (tensors * rows + 1) * columns * size_of(dtype) + 4 * (rows + columns),
               .flops = (residual ? 11 : 10) * rows * columns,
               .extra_bytes = 2 * rmsnorm_backward_scratch(rows, columns)};
  if (accumulate) {
    cost.bytes += 4 * columns;
    cost.flops += columns;
  }
  if (is_long(vectors)) {  // partial sums are read and written for each row
    cost.extra_bytes = 2 * sizeof(float) * rows * columns + rmsnorm_backward_scratch(rows, columns) +
                       rows * long_residence(vectors, 16).bytes_read_again();
  }
  return cost;
}

}  // namespace minillm::kernels
