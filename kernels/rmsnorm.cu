// Forward and recomputation. A row belongs to one warp as long as a warp's registers hold it, else to a
// block.
#include "kernels/rmsnorm.h"

#include <algorithm>

#include "core/checked.h"
#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"
#include "kernels/device/resident_row.h"
#include "kernels/device/row_offset.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kMaxThreads = 1024, kRowsOfSmallBlock = 4;

/// y = (x · rstd) · weight for the group of a row that is being visited; y and weight are those of the row.
/// Forward and recomputation share it, and with it every bit. Weights are loaded a few at a time, ahead of
/// stores that they would otherwise wait for.
template <class T, int N, int K>
__device__ void store_normalized(T* y, const ResidentRow<Packed<T, N>, K>& x, float rstd, const T* weight) {
  constexpr int kBatch = K > 4 ? 2 : 4;  // as registers allow
#pragma unroll
  for (int first = 0; first < K; first += kBatch) {
    Words<Packed<T, N>> weights[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      weights[k] = {};
      if (x.exists(first + k)) weights[k] = to_words(load_packed<N>(weight + x.vector(first + k) * N));
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      Floats<N> v = x[first + k].floats();
      const Floats<N> w = from_words(weights[k]).floats();
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = v[i] * rstd * w[i];
      if (x.exists(first + k)) store(y + x.vector(first + k) * N, v);
    }
  }
}

template <class T>
struct ForwardTensors {
  T* y;
  float* rstd;
  const T* x;
  const T* residual;  ///< these two with kResidual only
  T* sum;
};

template <class T, int N, int K, bool kResidual>
__global__ void __launch_bounds__(kMaxThreads, 1)
    rmsnorm_forward_kernel(ForwardTensors<T> a, const T* __restrict__ weight, int64_t rows, int columns,
                           float epsilon, int shared_slots) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const int64_t offset = row_offset(row, columns);
  const auto load_term = [&](int vector) {
    const Packed<T, N> x = load_packed<N>(a.x + offset + vector * N);
    if constexpr (!kResidual) {
      return x;
    } else {
      Floats<N> sum = x.floats();
      const Floats<N> residual = load<N>(a.residual + offset + vector * N);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += residual[i];
      return pack<T>(sum);
    }
  };
  float squares = 0;
  ResidentRow<Packed<T, N>, K> x(columns / N, dynamic_shared<Packed<T, N>>(), shared_slots);
  x.read(0, load_term, [&] {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const Floats<N> v = x[k].floats();
      if (kResidual && x.exists(k)) store(a.sum + offset + x.vector(k) * N, v);
      float of_vector = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) of_vector += v[i] * v[i];
      squares += of_vector;
    }
  });
  squares = block_sum(squares, shared<ReduceStorage>());
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(columns) + epsilon);
  if (threadIdx.x == 0) a.rstd[row] = rstd;
  const T* const read = kResidual ? a.sum : a.x;  // x and residual may be gone
  x.read_again([&](int vector) { return load_packed<N>(read + offset + vector * N); },
               [&] { store_normalized(a.y + offset, x, rstd, weight); });
}

template <class T, int N, int K>
__global__ void __launch_bounds__(kMaxThreads, 1)
    rmsnorm_recompute_kernel(T* y, const float* rstds, const T* x, const T* __restrict__ weight, int64_t rows,
                             int columns) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const int64_t offset = row_offset(row, columns);
  const float rstd = rstds[row];
  ResidentRow<Packed<T, N>, K> part(columns / N, nullptr, 0);
  part.read(
      0, [&](int vector) { return load_packed<N>(x + offset + vector * N); },
      [&] { store_normalized(y + offset, part, rstd, weight); });
}

template <int K>
RowResidence residence(int64_t vectors, int64_t vector_bytes) {
  return {.threads = static_cast<int>(std::min<int64_t>(threads_to_hold(vectors, K), kMaxThreads)),
          .registers = K,
          .vector_bytes = static_cast<int>(vector_bytes),
          .vectors = vectors,
          .shared_limit = kSharedOfBlock};
}

/// Calls body.operator()<T, N, K>(residence): four loads in flight are enough for short rows and where two
/// tensors are read, eight for others.
constexpr int kFew = 4, kMany = 8;
template <bool kMayBeMany, class Body>
void dispatch_rows(DType dtype, int access, int columns, const Body& body) {
  dispatch(dtype, access, [&]<class T, int N>() {
    const int64_t vectors = columns / N, bytes = sizeof(T) * N;
    if (!kMayBeMany || vectors <= kFew * kWarpSize)
      body.template operator()<T, N, kFew>(residence<kFew>(vectors, bytes));
    else if constexpr (kMayBeMany)
      body.template operator()<T, N, kMany>(residence<kMany>(vectors, bytes));
  });
}

/// Several rows of one warp share a block; others get a block each.
LaunchShape launch_shape(const RowResidence& r, int64_t rows, cudaStream_t stream) {
  const unsigned rows_of_block = r.threads == kWarpSize ? kRowsOfSmallBlock : 1;
  return {.grid = static_cast<unsigned>(ceil_div(rows, rows_of_block)),
          .block = dim3(static_cast<unsigned>(r.threads), rows_of_block),
          .shared_bytes = r.shared_bytes(),
          .stream = stream};
}

template <int K>
int64_t bytes_read_again(int64_t rows, int columns, DType dtype) {
  return rows * residence<K>(ceil_div(columns, 16 / size_of(dtype)), 16).bytes_read_again();
}

}  // namespace

void rmsnorm_forward(const RmsNormForward& a, cudaStream_t stream) {
  const int access = access_bytes({a.y, a.x, a.weight}, a.columns * size_of(a.dtype));
  dispatch_rows<true>(a.dtype, access, a.columns, [&]<class T, int N, int K>(const RowResidence& r) {
    const ForwardTensors<T> tensors = {static_cast<T*>(a.y), a.rstd, static_cast<const T*>(a.x), nullptr,
                                       nullptr};
    launch("rmsnorm_forward", rmsnorm_forward_kernel<T, N, K, false>, launch_shape(r, a.rows, stream),
           tensors, static_cast<const T*>(a.weight), a.rows, a.columns, a.epsilon, r.shared_slots());
  });
}

void rmsnorm_residual_forward(const RmsNormResidualForward& a, cudaStream_t stream) {
  const int access = access_bytes({a.sum, a.y, a.x, a.residual, a.weight}, a.columns * size_of(a.dtype));
  dispatch_rows<false>(a.dtype, access, a.columns, [&]<class T, int N, int K>(const RowResidence& r) {
    const ForwardTensors<T> tensors = {static_cast<T*>(a.y), a.rstd, static_cast<const T*>(a.x),
                                       static_cast<const T*>(a.residual), static_cast<T*>(a.sum)};
    launch("rmsnorm_residual_forward", rmsnorm_forward_kernel<T, N, K, true>, launch_shape(r, a.rows, stream),
           tensors, static_cast<const T*>(a.weight), a.rows, a.columns, a.epsilon, r.shared_slots());
  });
}

void rmsnorm_recompute(const RmsNormRecompute& a, cudaStream_t stream) {
  const int access = access_bytes({a.y, a.x, a.weight}, a.columns * size_of(a.dtype));
  dispatch_rows<false>(a.dtype, access, a.columns, [&]<class T, int N, int K>(const RowResidence& r) {
    LaunchShape shape = launch_shape(r, a.rows, stream);
    shape.shared_bytes = 0;
    launch("rmsnorm_recompute", rmsnorm_recompute_kernel<T, N, K>, shape, static_cast<T*>(a.y), a.rstd,
           static_cast<const T*>(a.x), static_cast<const T*>(a.weight), a.rows, a.columns);
  });
}

Cost rmsnorm_forward_cost(int64_t rows, int columns, DType dtype) {
  return {.bytes = (2 * rows + 1) * columns * size_of(dtype) + 4 * rows,
          .flops = 4 * rows * columns,
          .extra_bytes = bytes_read_again<kMany>(rows, columns, dtype)};
}

Cost rmsnorm_residual_forward_cost(int64_t rows, int columns, DType dtype) {
  return {.bytes = (4 * rows + 1) * columns * size_of(dtype) + 4 * rows,
          .flops = 5 * rows * columns,
          .extra_bytes = bytes_read_again<kFew>(rows, columns, dtype)};
}

Cost rmsnorm_recompute_cost(int64_t rows, int columns, DType dtype) {
  return {.bytes = (2 * rows + 1) * columns * size_of(dtype) + 4 * rows, .flops = 2 * rows * columns};
}

}  // namespace minillm::kernels
