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
constexpr int kVectors = 4;  // loads of a thread in flight

/// Elements that a block adds at a time, and a range's shortest length. Longer arrays have longer ranges, of
/// whole rounds, once there are kMaxRanges of them.
constexpr int64_t kRound = int64_t{kVectors} * kThreads * kWidth, kMaxRanges = 4096;

int64_t range_length(int64_t count) {
  return std::max(kRound, round_up(ceil_div(count, kMaxRanges), kRound));
}

int ranges_of(int64_t count) {
  return static_cast<int>(ceil_div(count, range_length(count)));
}

/// Four elements at `from` in accesses of N. The assignment of elements to threads, and so the sum, does not
/// depend on N.
template <int N>
__device__ Floats<kWidth> load_four(const float* from) {
  if constexpr (N == kWidth) return load<kWidth>(from);
  return {from[0], from[1], from[2], from[3]};
}

/// Of elements [first, last) those of the four at `i`; zeros for the others.
__device__ inline Floats<kWidth> load_end(const float* in, int64_t i, int64_t last) {
  Floats<kWidth> v{};
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    if (i + k < last) v[k] = in[i + k];
  return v;
}

template <bool kSquare>
__device__ void add_to(Floats<kWidth>& total, const Floats<kWidth>& v) {
#pragma unroll
  for (int k = 0; k < kWidth; ++k) total[k] += kSquare ? v[k] * v[k] : v[k];
}

template <int N, bool kSquare>
__global__ void __launch_bounds__(kThreads)
    sum_ranges_kernel(float* partials, const float* in, int64_t count, int64_t range) {
  const int64_t first = blockIdx.x * range;
  const int64_t last = first + range < count ? first + range : count;
  const int64_t rounds = (last - first) / kRound;
  Floats<kWidth> total{};
  int64_t i = first + threadIdx.x * kWidth;
  for (int64_t round = 0; round < rounds; ++round, i += kRound) {
    Floats<kWidth> v[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) v[k] = load_four<N>(in + i + k * (kThreads * kWidth));
#pragma unroll
    for (int k = 0; k < kVectors; ++k) add_to<kSquare>(total, v[k]);
  }
  for (; i < last; i += kThreads * kWidth) add_to<kSquare>(total, load_end(in, i, last));
  const float sum = block_sum((total[0] + total[1]) + (total[2] + total[3]), shared<ReduceStorage>());
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

/// One block. In double: the sums of ranges differ in size, and there are few of them.
__global__ void __launch_bounds__(kThreads)
    sum_partials_kernel(float* out, const float* partials, int count, bool accumulate) {
  struct Shared {
    double of_thread[kThreads];
  };
  Shared& s = shared<Shared>();
  const int thread = static_cast<int>(threadIdx.x);
  double total = 0;
  for (int i = thread; i < count; i += kThreads) total += partials[i];
  s.of_thread[thread] = total;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) s.of_thread[thread] += s.of_thread[thread + half];
  }
  if (thread != 0) return;
  const float sum = static_cast<float>(s.of_thread[0]);
  *out = accumulate ? *out + sum : sum;
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
         a.scratch, ranges, a.accumulate);
}

int64_t sum_scratch(int64_t count) {
  return ranges_of(count) * static_cast<int64_t>(sizeof(float));
}

Cost sum_cost(int64_t count, bool accumulate) {
  const int64_t added = accumulate ? 1 : 0;
  return {.bytes = 4 * (count + 1 + added), .flops = count + added, .extra_bytes = 2 * sum_scratch(count)};
}

}  // namespace minillm::kernels
