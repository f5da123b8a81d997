#include "kernels/rmsnorm.h"

#include <algorithm>

#include "core/checked.h"
#include "kernels/device/column_sum.h"
#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"

// A row belongs to as few warps as can hold it in registers, K vectors per thread. Rows too long for a block
// (K = 0) are read again from the cache.
namespace minillm::kernels {
namespace {

constexpr int kMaxThreads = 256;

/// Blocks of the backward pass: each leaves one row of partial weight gradients, which costs their traffic.
/// Two blocks for each multiprocessor of an H100; fixed, so that sums do not depend on the GPU.
constexpr int64_t kMaxBackwardBlocks = 264, kRowsPerBackwardBlock = 8;

int backward_blocks(int64_t rows) {
  return static_cast<int>(std::min(kMaxBackwardBlocks, ceil_div(rows, kRowsPerBackwardBlock)));
}

/// Calls body(slot, column) for the vectors of a row that belong to this thread; `slot` numbers them and is a
/// constant after unrolling when K > 0.
template <int N, int K, class Body>
__device__ void for_vector_of_row(int columns, const Body& body) {
  if constexpr (K > 0) {
#pragma unroll
    for (int slot = 0; slot < K; ++slot) {
      const int column = (slot * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * N;
      if (column < columns) body(slot, column);
    }
  } else {
    for (int column = threadIdx.x * N; column < columns; column += blockDim.x * N) body(0, column);
  }
}

/// This thread's part of a row, in registers when K > 0.
template <class T, int N, int K>
class RowPart {
 public:
  __device__ void read(const T* row, int columns) {
    row_ = row;
    if constexpr (K > 0)
      for_vector_of_row<N, K>(columns,
                              [&](int slot, int column) { kept_[slot] = load_packed<N>(row + column); });
  }
  __device__ Floats<N> at(int slot, int column) const {
    if constexpr (K > 0)
      return kept_[slot].floats();
    else
      return load<N>(row_ + column);
  }

 private:
  const T* row_ = nullptr;
  Packed<T, N> kept_[K > 0 ? K : 1] = {};
};

/// y = x · rstd · weight: forward and recomputation share it, and with it every bit.
template <class T, int N, int K>
__device__ void write_normalized(T* y, const RowPart<T, N, K>& x, float rstd, const T* weight, int columns) {
  for_vector_of_row<N, K>(columns, [&](int slot, int column) {
    Floats<N> v = x.at(slot, column);
    const Floats<N> w = load<N>(weight + column);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = v[k] * rstd * w[k];
    store(y + column, v);
  });
}

template <class T, int N, int K>
__global__ void __launch_bounds__(kMaxThreads, 1)
    rmsnorm_forward_kernel(T* y, float* rstd, const T* x, const T* weight, int64_t rows, int columns,
                           float epsilon) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  RowPart<T, N, K> part;
  part.read(x + row * columns, columns);
  float squares = 0;
  for_vector_of_row<N, K>(columns, [&](int slot, int column) {
    const Floats<N> v = part.at(slot, column);
#pragma unroll
    for (int k = 0; k < N; ++k) squares += v[k] * v[k];
  });
  squares = block_sum(squares, shared<ReduceStorage>());
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(columns) + epsilon);
  if (threadIdx.x == 0) rstd[row] = scale;
  write_normalized(y + row * columns, part, scale, weight, columns);
}

template <class T, int N, int K>
__global__ void __launch_bounds__(kMaxThreads, 1)
    rmsnorm_recompute_kernel(T* y, const float* rstd, const T* x, const T* weight, int64_t rows,
                             int columns) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  RowPart<T, N, K> part;
  part.read(x + row * columns, columns);
  write_normalized(y + row * columns, part, rstd[row], weight, columns);
}

/// The weight gradient of a block's rows in this thread's columns: in registers, or, for rows that do not
/// fit, in the block's row of `partials`, which no other thread touches.
template <int N, int K>
class WeightGradient {
 public:
  __device__ explicit WeightGradient(float* partial, int columns) : partial_(partial) {
    for_vector_of_row<N, K>(columns, [&](int slot, int column) {
#pragma unroll
      for (int k = 0; k < N; ++k) at(slot, column + k, k) = 0;
    });
  }
  __device__ void add(int slot, int column, const Floats<N>& v) {
#pragma unroll
    for (int k = 0; k < N; ++k) at(slot, column + k, k) += v[k];
  }
  /// Adds the parts of a block's rows of threads in order, each handing its sum to the next through `relay`.
  __device__ void write(float* relay, int columns) {
    if constexpr (K > 0) {
      for (int turn = 0; turn < static_cast<int>(blockDim.y); ++turn) {
        if (turn > 0) __syncthreads();
        if (turn == static_cast<int>(threadIdx.y)) take_turn(relay, columns);
      }
    }
  }

 private:
  __device__ float& at(int slot, int column, int k) {
    if constexpr (K > 0)
      return sum_[slot][k];
    else
      return partial_[column];
  }
  __device__ void take_turn(float* relay, int columns) {
    for_vector_of_row<N, K>(columns, [&](int slot, int column) {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        float* const handed = relay + (slot * N + k) * blockDim.x + threadIdx.x;
        if (threadIdx.y > 0) sum_[slot][k] += *handed;
        if (threadIdx.y + 1 < blockDim.y) *handed = sum_[slot][k];
      }
      if (threadIdx.y + 1 < blockDim.y) return;
      constexpr int kWidth = N < 4 ? N : 4;
#pragma unroll
      for (int k = 0; k < N; k += kWidth) {
        Floats<kWidth> out;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) out[i] = sum_[slot][k + i];
        store(partial_ + column + k, out);
      }
    });
  }

  float* partial_;
  float sum_[K > 0 ? K : 1][N];
};

template <class T>
struct BackwardTensors {
  T* dx;
  const T* dy;
  const T* x;
  const T* weight;
  const float* rstd;
  const T* residual;
  float* partials;  // [blocks, columns]
};

/// With x̂ = x·rstd:  dx = (dy·w - x̂·mean(dy·w·x̂))·rstd + residual,  dweight = Σ dy·x̂.
template <class T, int N, int K>
__global__ void __launch_bounds__(kMaxThreads, 1)
    rmsnorm_backward_kernel(BackwardTensors<T> a, int64_t rows, int columns) {
  const int64_t rows_per_block = (rows + gridDim.x - 1) / gridDim.x;
  const int64_t first = blockIdx.x * rows_per_block;
  const int64_t last = first + rows_per_block < rows ? first + rows_per_block : rows;
  WeightGradient<N, K> dweight(a.partials + int64_t{blockIdx.x} * columns, columns);
  for (int64_t base = first; base < last; base += blockDim.y) {
    const int64_t row = base + threadIdx.y;
    const int width = row < last ? columns : 0;  // threads without a row still meet the others in block_sum
    RowPart<T, N, K> x, dy, residual;
    x.read(a.x + row * columns, width);
    dy.read(a.dy + row * columns, width);
    if (a.residual != nullptr) residual.read(a.residual + row * columns, width);
    const float rstd = row < last ? a.rstd[row] : 0;
    float dot = 0;
    for_vector_of_row<N, K>(width, [&](int slot, int column) {
      const Floats<N> w = load<N>(a.weight + column), vx = x.at(slot, column);
      Floats<N> product = dy.at(slot, column);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        product[k] *= vx[k] * rstd;
        dot += product[k] * w[k];
      }
      dweight.add(slot, column, product);
    });
    const float mean = block_sum(dot, shared<ReduceStorage>()) / static_cast<float>(columns);
    for_vector_of_row<N, K>(width, [&](int slot, int column) {
      const Floats<N> w = load<N>(a.weight + column), vx = x.at(slot, column);
      Floats<N> v = dy.at(slot, column);
#pragma unroll
      for (int k = 0; k < N; ++k) v[k] = (v[k] * w[k] - vx[k] * rstd * mean) * rstd;
      if (a.residual != nullptr) {
        const Floats<N> r = residual.at(slot, column);
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] += r[k];
      }
      store(a.dx + row * columns + column, v);
    });
  }
  dweight.write(dynamic_shared<float>(), columns);
}

/// Vectors that a thread keeps: the smaller number for rows that so fit `small_threads` threads, the larger
/// for others. The backward pass keeps three rows and a sum, so its numbers are small and its warps many.
struct Residency {
  int small, small_threads, large;
};
constexpr Residency kForwardResidency = {2, kWarpSize, 8}, kBackwardResidency = {2, kMaxThreads, 4};

/// Calls body.operator()<T, N, K>(threads): the threads of a row of `columns` elements, a multiple of 32.
template <Residency kResidency, class Body>
void dispatch_rows(DType dtype, bool vectorize, int columns, const Body& body) {
  dispatch(dtype, vectorize, [&]<class T, int N>() {
    const auto threads_for = [&](int vectors) {
      return static_cast<int>(round_up(ceil_div(columns, int64_t{N} * vectors), kWarpSize));
    };
    if (const int threads = threads_for(kResidency.small); threads <= kResidency.small_threads)
      body.template operator()<T, N, kResidency.small>(threads);
    else if (const int threads = threads_for(kResidency.large); threads <= kMaxThreads)
      body.template operator()<T, N, kResidency.large>(threads);
    else
      body.template operator()<T, N, 0>(kMaxThreads);
  });
}

/// Several rows of one warp share a block; others get a block each.
dim3 forward_block(int threads) {
  return dim3(threads, threads == kWarpSize ? 4 : 1);
}

}  // namespace

void rmsnorm_forward(const RmsNormForward& a, cudaStream_t stream) {
  const bool vectorize = can_vectorize({a.y, a.x, a.weight}, a.columns * size_of(a.dtype));
  dispatch_rows<kForwardResidency>(a.dtype, vectorize, a.columns, [&]<class T, int N, int K>(int threads) {
    const dim3 block = forward_block(threads);
    launch("rmsnorm_forward", rmsnorm_forward_kernel<T, N, K>,
           {.grid = static_cast<unsigned>(ceil_div(a.rows, block.y)), .block = block, .stream = stream},
           static_cast<T*>(a.y), a.rstd, static_cast<const T*>(a.x), static_cast<const T*>(a.weight), a.rows,
           a.columns, a.epsilon);
  });
}

void rmsnorm_recompute(const RmsNormRecompute& a, cudaStream_t stream) {
  const bool vectorize = can_vectorize({a.y, a.x, a.weight}, a.columns * size_of(a.dtype));
  dispatch_rows<kForwardResidency>(a.dtype, vectorize, a.columns, [&]<class T, int N, int K>(int threads) {
    const dim3 block = forward_block(threads);
    launch("rmsnorm_recompute", rmsnorm_recompute_kernel<T, N, K>,
           {.grid = static_cast<unsigned>(ceil_div(a.rows, block.y)), .block = block, .stream = stream},
           static_cast<T*>(a.y), a.rstd, static_cast<const T*>(a.x), static_cast<const T*>(a.weight), a.rows,
           a.columns);
  });
}

void rmsnorm_backward(const RmsNormBackward& a, cudaStream_t stream) {
  const int blocks = backward_blocks(a.rows);
  const bool vectorize =
      can_vectorize({a.dx, a.dy, a.x, a.weight, a.residual, a.scratch}, a.columns * size_of(a.dtype));
  dispatch_rows<kBackwardResidency>(a.dtype, vectorize, a.columns, [&]<class T, int N, int K>(int threads) {
    const dim3 block(threads, kMaxThreads / threads);
    const BackwardTensors<T> tensors = {
        static_cast<T*>(a.dx),
        static_cast<const T*>(a.dy),
        static_cast<const T*>(a.x),
        static_cast<const T*>(a.weight),
        a.rstd,
        static_cast<const T*>(a.residual),
        a.scratch,
    };
    const size_t relay = block.y > 1 ? sizeof(float) * K * N * threads : 0;
    launch("rmsnorm_backward", rmsnorm_backward_kernel<T, N, K>,
           {.grid = static_cast<unsigned>(blocks), .block = block, .shared_bytes = relay, .stream = stream},
           tensors, a.rows, a.columns);
  });
  column_sum("rmsnorm_backward_dweight", a.dweight, a.scratch, blocks, a.columns, stream);
}

int64_t rmsnorm_backward_scratch(int64_t rows, int columns) {
  return backward_blocks(rows) * int64_t{columns} * static_cast<int64_t>(sizeof(float));
}

Cost rmsnorm_forward_cost(int64_t rows, int columns, DType dtype) {
  return {.bytes = (2 * rows + 1) * columns * size_of(dtype) + 4 * rows, .flops = 4 * rows * columns};
}

Cost rmsnorm_backward_cost(int64_t rows, int columns, bool residual, DType dtype) {
  const int64_t tensors = residual ? 4 : 3;
  return {.bytes = (tensors * rows + 1) * columns * size_of(dtype) + 4 * (rows + columns),
          .flops = (residual ? 11 : 10) * rows * columns};
}

}  // namespace minillm::kernels
