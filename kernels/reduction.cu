#include "kernels/reduction.h"

#include <algorithm>

#include "core/checked.h"
#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWidth = kFullWidth<float>;

/// Elements of a range: enough for a block to be worth its launch, and more once there are kMaxRanges of
/// them.
constexpr int64_t kMinRange = 16 * kThreads, kMaxRanges = 4096;

int64_t range_length(int64_t count) {
  return std::max(kMinRange, round_up(ceil_div(count, kMaxRanges), kWidth));
}

int ranges_of(int64_t count) {
  return static_cast<int>(ceil_div(count, range_length(count)));
}

/// Four elements at `first`, zeros past `count`; in accesses of N elements. The assignment of elements to
/// threads, and so the sum, does not depend on N.
template <int N>
__device__ Floats<kWidth> load_four(const float* in, int64_t first, int64_t count) {
  if (N == kWidth && first + kWidth <= count) return load<kWidth>(in + first);
  Floats<kWidth> v{};
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    if (first + k < count) v[k] = in[first + k];
  return v;
}

template <int N, bool kSquare>
__global__ void __launch_bounds__(kThreads)
    sum_ranges_kernel(float* partials, const float* in, int64_t count, int64_t range) {
  const int64_t first = blockIdx.x * range;
  const int64_t last = first + range < count ? first + range : count;
  Floats<kWidth> total{};
#pragma unroll 4
  for (int64_t i = first + threadIdx.x * kWidth; i < last; i += kThreads * kWidth) {
    const Floats<kWidth> v = load_four<N>(in, i, last);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) total[k] += kSquare ? v[k] * v[k] : v[k];
  }
  const float sum = block_sum((total[0] + total[1]) + (total[2] + total[3]), shared<ReduceStorage>());
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

/// One block: each thread adds a contiguous piece of the partials, the first thread the pieces, both in
/// order.
__global__ void __launch_bounds__(kThreads)
    sum_partials_kernel(float* out, const float* partials, int count) {
  struct Shared {
    double of_thread[kThreads];
  };
  Shared& s = shared<Shared>();
  const int length = (count + kThreads - 1) / kThreads;
  const int first = static_cast<int>(threadIdx.x) * length, last = min(first + length, count);
  double total = 0;
  for (int i = first; i < last; ++i) total += partials[i];
  s.of_thread[threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int thread = 1; thread < kThreads; ++thread) total += s.of_thread[thread];
  *out = static_cast<float>(total);
}

}  // namespace

void sum(const Sum& a, cudaStream_t stream) {
  const int ranges = ranges_of(a.count);
  const bool vectorize = can_vectorize({a.in});
  const auto kernel = a.square ? (vectorize ? sum_ranges_kernel<kWidth, true> : sum_ranges_kernel<1, true>)
                               : (vectorize ? sum_ranges_kernel<kWidth, false> : sum_ranges_kernel<1, false>);
  launch("sum_ranges", kernel, {.grid = static_cast<unsigned>(ranges), .block = kThreads, .stream = stream},
         a.scratch, a.in, a.count, range_length(a.count));
  launch("sum_partials", sum_partials_kernel, {.grid = 1, .block = kThreads, .stream = stream}, a.out,
         a.scratch, ranges);
}

int64_t sum_scratch(int64_t count) {
  return ranges_of(count) * static_cast<int64_t>(sizeof(float));
}

Cost sum_cost(int64_t count) {
  return {.bytes = 4 * count + 4, .flops = count};
}

}  // namespace minillm::kernels
