// One block per row: a pass that accumulates (maximum, sum of exponentials) online, one block reduction, and
// a pass that writes the gradient. The second pass runs backwards, so that it starts with what is still in
// cache. A thread writes only elements that it alone has read, which is what makes working in place safe.
#include "kernels/cross_entropy.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

struct Shared {
  ReduceStorage reduce;
};

/// Maximum of a set of logits and sum of exp(logit - maximum).
struct Statistics {
  float maximum = -INFINITY;
  float sum = 0;
};

/// What is subtracted before exponentials: -inf - -inf would turn logits that only have probability 0 into
/// NaN.
__device__ float reference_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

/// NaN reaches the sum, though never the maximum: fmaxf passes over it.
template <int N>
__device__ void accumulate(Statistics& statistics, const Floats<N>& x) {
  float maximum = statistics.maximum;
#pragma unroll
  for (int i = 0; i < N; ++i) maximum = fmaxf(maximum, x[i]);
  const float reference = reference_of(maximum);
  statistics.sum *= exp2f((statistics.maximum - reference) * kLog2E);
#pragma unroll
  for (int i = 0; i < N; ++i) statistics.sum += exp2f((x[i] - reference) * kLog2E);
  statistics.maximum = maximum;
}

template <class T, int N>
__global__ void __launch_bounds__(1024)
    cross_entropy_kernel(T* logits, float* loss, const int32_t* targets, const float* scale, int vocabulary) {
  T* row = logits + int64_t{blockIdx.x} * vocabulary;
  const int target = targets[blockIdx.x];
  const int first = static_cast<int>(threadIdx.x) * N, step = static_cast<int>(blockDim.x) * N;
  if (target == kIgnoreTarget) {
    for (int c = first; c < vocabulary; c += step) store(row + c, Floats<N>{});
    if (threadIdx.x == 0) loss[blockIdx.x] = 0.0f;
    return;
  }
  const bool valid = 0 <= target && target < vocabulary;
  const bool owns_target = valid && target % step / N == static_cast<int>(threadIdx.x);
  const float target_logit = owns_target ? to_float(row[target]) : 0.0f;

  Statistics mine;
  for (int c = first; c < vocabulary; c += step) accumulate(mine, load<N>(row + c));
  ReduceStorage& storage = shared<Shared>().reduce;
  const float reference = reference_of(block_max(mine.maximum, storage));
  const float sum = block_sum(mine.sum * exp2f((mine.maximum - reference) * kLog2E), storage);

  // Not -log(probability): that is infinite once the probability underflows.
  if (owns_target) loss[blockIdx.x] = (reference - target_logit) + logf(sum);
  if (!valid && threadIdx.x == 0) loss[blockIdx.x] = NAN;

  const float inverse = valid ? 1.0f / sum : NAN;
  const float factor = *scale;
  for (int c = first + (vocabulary - 1 - first) / step * step; c >= first && c < vocabulary; c -= step) {
    const Floats<N> x = load<N>(row + c);
    Floats<N> gradient;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float probability = exp2f((x[i] - reference) * kLog2E) * inverse;
      gradient[i] = (c + i == target ? probability - 1.0f : probability) * factor;
    }
    store(row + c, gradient);
  }
}

/// One block, so that the order of the sum is fixed; each addend and sum is a whole number.
__global__ void __launch_bounds__(1024)
    count_valid_targets_kernel(float* count, const int32_t* targets, int64_t rows) {
  int mine = 0;
  for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) mine += targets[r] != kIgnoreTarget;
  const float total = block_sum(static_cast<float>(mine), shared<Shared>().reduce);
  if (threadIdx.x == 0) *count = total;
}

__global__ void reciprocal_of_count_kernel(float* scale, const float* count) {
  *scale = 1.0f / fmaxf(*count, 1.0f);
}

/// Threads of a block with about 32 elements each: fewer leave memory idle, more wait for each other.
unsigned threads_for(int64_t elements) {
  constexpr int64_t kPerThread = 32;
  return std::bit_ceil(static_cast<unsigned>(std::clamp<int64_t>(elements / kPerThread, kWarpSize, 1024)));
}

}  // namespace

void cross_entropy(const CrossEntropy& a, cudaStream_t stream) {
  const bool vectorize = can_vectorize({a.logits}, a.vocabulary * size_of(a.dtype));
  dispatch(a.dtype, vectorize, [&]<class T, int N>() {
    launch("cross_entropy", cross_entropy_kernel<T, N>,
           {static_cast<unsigned>(a.rows), threads_for(a.vocabulary), 0, stream}, static_cast<T*>(a.logits),
           a.loss, a.targets, a.scale, a.vocabulary);
  });
}

Cost cross_entropy_cost(int64_t rows, int vocabulary, DType dtype) {
  // Per logit: subtract, exponential and add for the sum; subtract, exponential and two products for the
  // gradient.
  return {.bytes = rows * (2 * vocabulary * size_of(dtype) + 8), .flops = 7 * rows * vocabulary};
}

void count_valid_targets(float* count, const int32_t* targets, int64_t rows, cudaStream_t stream) {
  launch("count_valid_targets", count_valid_targets_kernel, {1, threads_for(rows), 0, stream}, count, targets,
         rows);
}

void reciprocal_of_count(float* scale, const float* count, cudaStream_t stream) {
  launch("reciprocal_of_count", reciprocal_of_count_kernel, {1, 1, 0, stream}, scale, count);
}

}  // namespace minillm::kernels
