// One block per row. A first pass over the row, which then stays on chip, accumulates (maximum, sum of
// exponentials); one reduction over the block; a second pass writes the gradient.
#include "kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.h"
#include "kernels/device/launch.h"
#include "kernels/device/packed_max.h"
#include "kernels/device/ptx.h"
#include "kernels/device/reduce.h"
#include "kernels/device/resident_row.h"
#include "kernels/device/row_offset.h"
#include "kernels/device/shared.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kMaxThreads = 1024, kMaxWarps = kMaxThreads / kWarpSize;
constexpr float kLog2OfE = 1.4426950408889634f;

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

/// Subtracting before multiplying by log2(e), not folding both into one FMA, keeps logits of any finite size
/// exact.
__device__ float exponential(float logit, float reference) {
  return exp2_approx((logit - reference) * kLog2OfE);
}

__device__ Statistics warp_statistics(Statistics mine) {
  const float maximum = warp_max(mine.maximum);
  return {maximum, warp_sum(mine.sum * exponential(mine.maximum, reference_of(maximum)))};
}

struct WarpStatistics {
  float maximum[kMaxWarps], sum[kMaxWarps];
};

/// Every warp combines the warps' parts for itself: one barrier. It also separates all reads of the row from
/// the writes that follow.
__device__ Statistics block_statistics(Statistics mine) {
  WarpStatistics& of = shared<WarpStatistics>();
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  mine = warp_statistics(mine);
  if (lane == 0) {
    of.maximum[warp] = mine.maximum;
    of.sum[warp] = mine.sum;
  }
  __syncthreads();
  mine = {};
  if (lane < static_cast<int>(blockDim.x) / kWarpSize) mine = {of.maximum[lane], of.sum[lane]};
  return warp_statistics(mine);
}

/// A row as it lies in memory: elements before the first 16-byte boundary, whole vectors, and what is left of
/// the vocabulary. Of the fewer than 2 N elements outside vectors each of the first threads has one, so that
/// a row of any alignment is accessed 16 bytes at a time.
template <class T>
struct LogitRow {
  static constexpr int N = kFullWidth<T>;
  T* row;
  int vocabulary, head, vectors;

  __device__ LogitRow(T* row, int vocabulary) : row(row), vocabulary(vocabulary) {
    const auto after_boundary = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    head = min((N - after_boundary) % N, vocabulary);
    vectors = (vocabulary - head) / N;
  }
  __device__ T* vector(int v) const { return row + head + v * N; }
  /// The element outside vectors that this thread has, or null.
  __device__ T* single() const {
    const int thread = static_cast<int>(threadIdx.x);
    const int column = thread < head ? thread : thread + vectors * N;
    return column < vocabulary && (thread < head || thread < vocabulary - vectors * N) ? row + column
                                                                                       : nullptr;
  }
  /// The thread that has `column`.
  __device__ int owner(int column) const {
    const int after_head = column - head, v = after_head / N;
    if (after_head < 0) return column;
    return v < vectors ? v % static_cast<int>(blockDim.x) : column - vectors * N;
  }
};

/// One maximum for a group, so that an element costs one exponential. NaN reaches the sum, though never the
/// maximum: fmaxf passes over it.
template <class T, int N, int K>
__device__ void accumulate(Statistics& statistics, const ResidentRow<Packed<T, N>, K>& row) {
  Packed<T, N> largest = row[0];
#pragma unroll
  for (int k = 1; k < K; ++k) largest = packed_max(largest, row[k]);
  float maximum = statistics.maximum;
#pragma unroll
  for (int i = 0; i < N; ++i) maximum = fmaxf(maximum, to_float(largest.element[i]));
  const float reference = reference_of(maximum);
  float sum = statistics.sum * exponential(statistics.maximum, reference);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const Floats<N> x = row[k].floats();
    float of_vector = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) of_vector += exponential(x[i], reference);
    sum += of_vector;
  }
  statistics = {maximum, sum};
}

template <class T>
__device__ void write_zeros(const LogitRow<T>& row) {
  for (int v = threadIdx.x; v < row.vectors; v += blockDim.x) store(row.vector(v), Floats<LogitRow<T>::N>{});
  if (T* const single = row.single()) *single = from_float<T>(0.0f);
}

template <class T, int K>
__global__ void __launch_bounds__(kMaxThreads, 1)
    cross_entropy_kernel(T* logits, float* loss, const int32_t* targets, const float* scale, int vocabulary,
                         int columns, int shared_slots) {
  constexpr int N = kFullWidth<T>;
  const int target = targets[blockIdx.x];
  const LogitRow<T> row(logits + row_offset(blockIdx.x, columns), vocabulary);
  for (int c = vocabulary + static_cast<int>(threadIdx.x); c < columns; c += static_cast<int>(blockDim.x))
    row.row[c] = from_float<T>(0.0f);
  if (target == kIgnoreTarget) {
    write_zeros(row);
    if (threadIdx.x == 0) loss[blockIdx.x] = 0.0f;
    return;
  }
  const bool valid = 0 <= target && target < vocabulary;
  const bool owns_target = valid && row.owner(target) == static_cast<int>(threadIdx.x);
  const float target_logit = owns_target ? to_float(row.row[target]) : 0.0f;
  T* const single = row.single();
  const float single_logit = single != nullptr ? to_float(*single) : -INFINITY;

  constexpr uint32_t kMissing = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u;  // -inf in all elements
  const auto load_vector = [&](int v) { return load_packed<N>(row.vector(v)); };
  ResidentRow<Packed<T, N>, K> resident(row.vectors, dynamic_shared<Packed<T, N>>(), shared_slots);
  Statistics statistics = {single_logit, single_logit == -INFINITY ? 0.0f : 1.0f};
  resident.read(kMissing, load_vector, [&] { accumulate(statistics, resident); });
  statistics = block_statistics(statistics);

  const float reference = reference_of(statistics.maximum);
  const float inverse = valid ? 1.0f / statistics.sum : NAN;
  const float factor = *scale, weight = inverse * factor;
  resident.read_again(load_vector, [&] {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!resident.exists(k)) continue;
      Floats<N> gradient = resident[k].floats();
#pragma unroll
      for (int i = 0; i < N; ++i) gradient[i] = exponential(gradient[i], reference) * weight;
      store(row.vector(resident.vector(k)), gradient);
    }
  });
  if (single != nullptr) *single = from_float<T>(exponential(single_logit, reference) * weight);
  if (owns_target) {  // overwrites its own probability; p - 1 of a rounded p would lose all digits near p = 1
    const float probability = exponential(target_logit, reference) * inverse;
    row.row[target] = from_float<T>((probability - 1.0f) * factor);
    // Not -log(probability): that is infinite once the probability underflows.
    loss[blockIdx.x] = (reference - target_logit) + logf(statistics.sum);
  }
  if (!valid && threadIdx.x == 0) loss[blockIdx.x] = NAN;
}

/// One block, so that no second launch and no scratch is needed.
__global__ void __launch_bounds__(kMaxThreads, 1)
    count_valid_targets_kernel(float* count, const int32_t* targets, int64_t rows) {
  struct Shared {
    int64_t of_warp[kMaxWarps];
  };
  Shared& s = shared<Shared>();
  int64_t mine = 0;
#pragma unroll 8
  for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) mine += targets[r] != kIgnoreTarget;
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    mine += __shfl_xor_sync(kAllLanes, mine, distance);
  if (threadIdx.x % kWarpSize == 0) s.of_warp[threadIdx.x / kWarpSize] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / kWarpSize; ++warp) mine += s.of_warp[warp];
  *count = static_cast<float>(mine);
}

__global__ void reciprocal_of_count_kernel(float* scale, const float* count) {
  *scale = 1.0f / fmaxf(*count, 1.0f);
}

/// Rows of up to a few hundred vectors leave most of 8 slots empty.
constexpr int kFewSlots = 2, kManySlots = 8, kFewThreads = 128;

/// 512 threads as long as registers and 48 KiB hold the row: two blocks on a multiprocessor, of which one
/// computes while the other's loads are under way. 1024 threads for longer rows.
RowResidence residence(int vocabulary, DType dtype) {
  RowResidence r = {.threads = kMaxThreads / 2,
                    .registers = kManySlots,
                    .vector_bytes = 16,
                    .vectors = vocabulary / (16 / size_of(dtype)),  // whole ones; a row may have one fewer
                    .shared_limit = kSharedOfBlock / 2};
  if (r.vectors <= kFewThreads * kFewSlots) r.registers = kFewSlots;
  r.threads = static_cast<int>(std::min<int64_t>(r.threads, threads_to_hold(r.vectors, r.registers)));
  if (r.bytes_read_again() > 0) {
    r.threads = kMaxThreads;
    r.shared_limit = kSharedOfBlock;
  }
  return r;
}

int padded_columns(int vocabulary, int columns) {
  if (columns != 0 && columns < vocabulary)
    throw UsageError("cross_entropy: rows of " + std::to_string(columns) + " columns cannot hold " +
                     std::to_string(vocabulary) + " logits; columns must be 0 or at least the vocabulary");
  return columns == 0 ? vocabulary : columns;
}

}  // namespace

void cross_entropy(const CrossEntropy& a, cudaStream_t stream) {
  const int columns = padded_columns(a.vocabulary, a.columns);
  const RowResidence r = residence(a.vocabulary, a.dtype);
  dispatch(a.dtype, [&]<class T>() {
    const auto kernel =
        r.registers == kFewSlots ? cross_entropy_kernel<T, kFewSlots> : cross_entropy_kernel<T, kManySlots>;
    launch("cross_entropy", kernel,
           {.grid = static_cast<unsigned>(a.rows),
            .block = static_cast<unsigned>(r.threads),
            .shared_bytes = r.shared_bytes(),
            .stream = stream},
           static_cast<T*>(a.logits), a.loss, a.targets, a.scale, a.vocabulary, columns, r.shared_slots());
  });
}

Cost cross_entropy_cost(int64_t rows, int vocabulary, DType dtype, int columns) {
  const int64_t written = padded_columns(vocabulary, columns);
  // Per logit: an exponential of a scaled difference (3) for the sum (1) and again for the gradient (1).
  return {.bytes = rows * ((vocabulary + written) * size_of(dtype) + 8),
          .flops = 8 * rows * vocabulary,
          .extra_bytes = rows * residence(vocabulary, dtype).bytes_read_again()};
}

void count_valid_targets(float* count, const int32_t* targets, int64_t rows, cudaStream_t stream) {
  const int64_t threads = std::min<int64_t>(threads_to_hold(rows, 1), kMaxThreads);
  launch("count_valid_targets", count_valid_targets_kernel,
         {.grid = 1, .block = static_cast<unsigned>(threads), .stream = stream}, count, targets, rows);
}

void reciprocal_of_count(float* scale, const float* count, cudaStream_t stream) {
  launch("reciprocal_of_count", reciprocal_of_count_kernel, {.grid = 1, .block = 1, .stream = stream}, scale,
         count);
}

}  // namespace minillm::kernels
