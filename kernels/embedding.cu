#include "kernels/embedding.h"

#include <algorithm>
#include <bit>

#include "core/checked.h"
#include "kernels/device/launch.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

template <class T, int N>
__global__ void embedding_forward_kernel(T* out, const T* table, const int32_t* tokens, int64_t count,
                                         int columns) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (i >= count) return;
  const T* from = table + int64_t{tokens[i]} * columns;
  T* to = out + i * columns;
  for (int c = static_cast<int>(threadIdx.x) * N; c < columns; c += static_cast<int>(blockDim.x) * N)
    *reinterpret_cast<Packed<T, N>*>(to + c) = load_packed<N>(from + c);
}

/// A token and where it occurs.
struct alignas(8) Occurrence {
  int32_t token, position;
};

constexpr int kDigitBits = 4;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kSortThreads = 512;

struct SortShared {
  int offset[kDigits * kSortThreads];  ///< [digit][thread]
  int total[kSortThreads];
};

/// Replaces shared.offset, in its order of digit, then thread, by the sum of all entries before each one.
__device__ void exclusive_sum(SortShared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  int* mine = shared.offset + thread * kDigits;  // any partition into equal runs serves
  int sum = 0;
  for (int i = 0; i < kDigits; ++i) sum += mine[i];
  shared.total[thread] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < thread; ++i) sum += shared.total[i];
  for (int i = 0; i < kDigits; ++i) {
    const int entry = mine[i];
    mine[i] = sum;
    sum += entry;
  }
  __syncthreads();
}

/// Stable radix sort by token in one block, least significant digit first; the result is in `sorted`. Every
/// thread counts and moves a contiguous range of its own, so that equal digits keep their order.
__global__ void __launch_bounds__(kSortThreads, 1)
    embedding_sort_kernel(Occurrence* sorted, Occurrence* spare, const int32_t* tokens, int count,
                          int passes) {
  SortShared& s = shared<SortShared>();
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int64_t range = (int64_t{count} + threads - 1) / threads;
  const int begin = static_cast<int>(min(thread * range, int64_t{count}));
  const int end = static_cast<int>(min(begin + range, int64_t{count}));

  Occurrence* to = passes % 2 == 1 ? sorted : spare;
  const Occurrence* from = nullptr;  // the first pass reads the tokens themselves
  for (int pass = 0; pass < passes; ++pass) {
    const auto slot = [&](int token) -> int& {
      return s.offset[(token >> (pass * kDigitBits) & (kDigits - 1)) * threads + thread];
    };
    for (int digit = 0; digit < kDigits; ++digit) s.offset[digit * threads + thread] = 0;
    for (int i = begin; i < end; ++i) ++slot(from ? from[i].token : tokens[i]);
    __syncthreads();
    exclusive_sum(s);
    for (int i = begin; i < end; ++i) {
      const Occurrence occurrence = from ? from[i] : Occurrence{tokens[i], i};
      to[slot(occurrence.token)++] = occurrence;
    }
    __syncthreads();
    from = to;
    to = to == sorted ? spare : sorted;
  }
}

/// A warp per occurrence and 32·N columns. The first occurrence of a token adds all rows of the token; the
/// others have nothing to do.
template <class T, int N>
__global__ void embedding_sum_kernel(float* dtable, const T* dout, const Occurrence* sorted, int64_t count,
                                     int columns) {
  const int64_t begin = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (begin >= count) return;
  const int token = sorted[begin].token;
  if (begin > 0 && sorted[begin - 1].token == token) return;
  int64_t end = begin + 1;
  while (end < count && sorted[end].token == token) ++end;

  const int step = static_cast<int>(gridDim.y * blockDim.x) * N;
  for (int c = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * N; c < columns; c += step) {
    Floats<N> sum{};
#pragma unroll 4
    for (int64_t i = begin; i < end; ++i) {
      const Floats<N> row = load<N>(dout + int64_t{sorted[i].position} * columns + c);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += row[k];
    }
    store(dtable + int64_t{token} * columns + c, sum);
  }
}

constexpr int kThreads = 128;
constexpr int kWarp = 32;

int sort_passes(int64_t vocabulary) {
  const int bits = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(vocabulary, 2) - 1));
  return static_cast<int>(ceil_div(bits, kDigitBits));
}

}  // namespace

void embedding_forward(const EmbeddingForward& a, cudaStream_t stream) {
  const bool vectorize = can_vectorize({a.out, a.table}, a.columns * size_of(a.dtype));
  dispatch(a.dtype, vectorize, [&]<class T, int N>() {
    const unsigned across =
        std::bit_ceil(static_cast<unsigned>(std::clamp<int64_t>(a.columns / N, 1, kThreads)));
    const unsigned rows = kThreads / across;
    launch("embedding_forward", embedding_forward_kernel<T, N>,
           {static_cast<unsigned>(ceil_div(a.count, rows)), dim3(across, rows), 0, stream},
           static_cast<T*>(a.out), static_cast<const T*>(a.table), a.tokens, a.count, a.columns);
  });
}

Cost embedding_forward_cost(int64_t count, int columns, DType dtype) {
  return {.bytes = count * (2 * columns * size_of(dtype) + 4), .flops = 0};
}

void embedding_backward(const EmbeddingBackward& a, cudaStream_t stream) {
  const int64_t table_bytes = a.vocabulary * a.columns * static_cast<int64_t>(sizeof(float));
  check_launch(cudaMemsetAsync(a.dtable, 0, table_bytes, stream), "embedding_backward (clearing the table)");
  if (a.count == 0) return;
  auto* sorted = static_cast<Occurrence*>(a.scratch);
  const auto sort_threads =
      std::bit_ceil(static_cast<unsigned>(std::clamp<int64_t>(a.count / 16, kWarp, kSortThreads)));
  launch("embedding_sort", embedding_sort_kernel, {1, sort_threads, 0, stream}, sorted, sorted + a.count,
         a.tokens, narrow<int>(a.count), sort_passes(a.vocabulary));

  const bool vectorize = can_vectorize({a.dtable, a.dout}, a.columns * size_of(a.dtype));
  dispatch(a.dtype, vectorize, [&]<class T, int kWidth>() {
    constexpr int N = std::min(kWidth, 4);  // 16 bytes of the fp32 table
    constexpr unsigned kRows = kThreads / kWarp;
    const auto chunks = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(a.columns, kWarp * N), 1, 65535));
    launch("embedding_sum", embedding_sum_kernel<T, N>,
           {dim3(static_cast<unsigned>(ceil_div(a.count, kRows)), chunks), dim3(kWarp, kRows), 0, stream},
           a.dtable, static_cast<const T*>(a.dout), sorted, a.count, a.columns);
  });
}

int64_t embedding_backward_scratch(int64_t count, int64_t) {
  return 2 * count * static_cast<int64_t>(sizeof(Occurrence));
}

Cost embedding_backward_cost(int64_t count, int64_t vocabulary, int columns, DType dtype) {
  return {.bytes = count * (columns * size_of(dtype) + 4) + vocabulary * columns * 4,
          .flops = count * columns};
}

}  // namespace minillm::kernels
