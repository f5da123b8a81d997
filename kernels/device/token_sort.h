// Stable sort of the positions of tokens by token id: least-significant-digit radix sort over the whole GPU.
// Ranks are counted, never raced for, so the result is the same in any order of blocks.
//
// A pass is three launches: each block counts the digits of its range of positions; the counts are summed
// over the blocks before; each block moves its range. Waiting for the blocks before instead would save
// traffic that is small beside what the sorted positions are used for, and needs blocks that spin.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/checked.h"
#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"
#include "kernels/device/scan.h"
#include "kernels/device/shared.h"

namespace minillm::kernels {

/// A token and where it occurs.
struct alignas(8) Occurrence {
  int32_t token, position;
};

inline constexpr int kSortThreads = 256, kSortWarps = kSortThreads / kWarpSize;
inline constexpr int kSortRounds = 8;  ///< elements of a thread
inline constexpr int kSortTile = kSortThreads * kSortRounds;
inline constexpr int kMaxSortBlocks = kSortThreads;  ///< a thread for each in the sum over blocks
inline constexpr int kMaxDigitBits = 9, kMaxDigits = 1 << kMaxDigitBits;

/// The shape of a sort; a function of the counts only.
struct TokenSort {
  int count;  ///< of positions
  int blocks, passes, digit_bits;

  TokenSort(int64_t positions, int64_t vocabulary)
      : count(narrow<int>(positions)),
        blocks(static_cast<int>(std::clamp<int64_t>(ceil_div(positions, kSortTile), 1, kMaxSortBlocks))) {
    const int bits = std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(vocabulary - 1))));
    passes = static_cast<int>(ceil_div(bits, kMaxDigitBits));
    digit_bits = static_cast<int>(ceil_div(bits, passes));
  }
  int digits() const { return 1 << digit_bits; }
  /// Positions of a block: whole tiles.
  int64_t range() const { return round_up(ceil_div(count, blocks), kSortTile); }
  /// Entries of SortScratch::counts.
  int64_t counts() const { return int64_t{digits()} * (blocks + 1); }
};

struct SortScratch {
  Occurrence* spare;  ///< [count]
  int* counts;        ///< [TokenSort::counts()]
};

/// What is sorted: positions in their own order before the first pass (occurrences = nullptr), then the
/// occurrences as the pass before left them.
struct SortInput {
  const int32_t* tokens;
  const Occurrence* occurrences;
  int count;
  int64_t range;
  int shift, digit_bits;

  __device__ Occurrence at(int64_t i) const {
    return occurrences != nullptr ? occurrences[i] : Occurrence{tokens[i], static_cast<int32_t>(i)};
  }
  __device__ int digit(int token) const { return token >> shift & ((1 << digit_bits) - 1); }
  __device__ int64_t begin() const { return blockIdx.x * range; }
  __device__ int64_t end() const { return begin() + range < count ? begin() + range : count; }
};

/// counts[digit][block]
template <int kThreads>
__global__ void __launch_bounds__(kThreads) sort_count_kernel(int* counts, SortInput in) {
  struct Shared {
    int count[kMaxDigits];
  };
  Shared& s = shared<Shared>();
  const int digits = 1 << in.digit_bits;
  for (int d = static_cast<int>(threadIdx.x); d < digits; d += kThreads) s.count[d] = 0;
  __syncthreads();
  for (int64_t i = in.begin() + threadIdx.x; i < in.end(); i += kThreads)
    atomicAdd(&s.count[in.digit(in.at(i).token)], 1);
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < digits; d += kThreads)
    counts[int64_t{d} * gridDim.x + blockIdx.x] = s.count[d];
}

/// A block per digit: replaces counts[digit][·] by the sums over the blocks before; totals[digit] is that of
/// all blocks. At least a thread for each of the `blocks`.
template <int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads) sort_sum_kernel(int* counts, int* totals, int blocks) {
  const int block = static_cast<int>(threadIdx.x);
  int* const of_digit = counts + int64_t{blockIdx.x} * blocks;
  const int count = block < blocks ? of_digit[block] : 0;
  const int before = block_exclusive_sum(count, shared<ScanStorage>());
  if (block < blocks) of_digit[block] = before;
  if (block == blocks - 1) totals[blockIdx.x] = before + count;
}

/// The lanes whose digit is the caller's, out of those that are `valid`, which the caller is.
__device__ inline unsigned lanes_of_digit(int digit, int digit_bits, bool valid) {
  unsigned lanes = __ballot_sync(kAllLanes, valid);
  for (int bit = 0; bit < digit_bits; ++bit) {
    const bool set = (digit >> bit & 1) != 0;
    const unsigned vote = __ballot_sync(kAllLanes, set);
    lanes &= set ? vote : ~vote;
  }
  return lanes;
}

struct SortMoveShared {
  int next[kMaxDigits];                 ///< where the block's next occurrence of a digit goes
  int of_warp[kSortWarps][kMaxDigits];  ///< counts of the tile's digits, then where they go
  ScanStorage scan;
};

/// next[digit] = all occurrences of smaller digits + those of this digit in the blocks before.
template <int kThreads>
__device__ void start_offsets(SortMoveShared& s, const int* counts, const int* totals, int digits) {
  constexpr int kPerThread = kMaxDigits / kThreads;
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  int sum = 0;
  for (int d = first; d < first + kPerThread && d < digits; ++d) sum += totals[d];
  int before = block_exclusive_sum(sum, s.scan);
  for (int d = first; d < first + kPerThread && d < digits; ++d) {
    s.next[d] = before + counts[int64_t{d} * gridDim.x + blockIdx.x];
    before += totals[d];
  }
}

/// Moves each range to where its digits belong. In a tile a warp owns adjacent positions and goes through
/// them 32 at a time: the order of (tile, warp, round, lane) is that of positions.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sort_move_kernel(Occurrence* out, const int* counts, const int* totals, SortInput in) {
  SortMoveShared& s = shared<SortMoveShared>();
  const int digits = 1 << in.digit_bits;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize,
            warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int* const of_warp = s.of_warp[warp];
  start_offsets<kThreads>(s, counts, totals, digits);
  for (int64_t tile = in.begin(); tile < in.end(); tile += kSortTile) {
    for (int d = lane; d < digits; d += kWarpSize) of_warp[d] = 0;
    __syncwarp();
    Occurrence item[kSortRounds];
    int rank[kSortRounds];
    const int64_t first = tile + (warp * kSortRounds) * kWarpSize + lane;
#pragma unroll
    for (int r = 0; r < kSortRounds; ++r) {
      const bool valid = first + r * kWarpSize < in.end();
      item[r] = valid ? in.at(first + r * kWarpSize) : Occurrence{0, 0};
      const int digit = in.digit(item[r].token);
      const unsigned lanes = lanes_of_digit(digit, in.digit_bits, valid);
      const int before = __popc(lanes & ((1u << lane) - 1));
      rank[r] = of_warp[digit] + before;
      __syncwarp();
      if (valid && before == 0) of_warp[digit] += __popc(lanes);
      __syncwarp();
    }
    __syncthreads();
    for (int d = static_cast<int>(threadIdx.x); d < digits; d += kThreads) {
      int next = s.next[d];
      for (int w = 0; w < kSortWarps; ++w) {
        const int count = s.of_warp[w][d];
        s.of_warp[w][d] = next;
        next += count;
      }
      s.next[d] = next;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kSortRounds; ++r)
      if (first + r * kWarpSize < in.end()) out[of_warp[in.digit(item[r].token)] + rank[r]] = item[r];
    __syncwarp();
  }
}

/// sorted[count] = the positions of `tokens`, which are in [0, vocabulary), by token, then by position.
inline void sort_tokens(Occurrence* sorted, const int32_t* tokens, const TokenSort& sort,
                        const SortScratch& scratch, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(sort.blocks), digits = static_cast<unsigned>(sort.digits());
  const auto threads_for_blocks = static_cast<unsigned>(round_up(sort.blocks, kWarpSize));
  int* const totals = scratch.counts + int64_t{digits} * blocks;
  Occurrence* out = sort.passes % 2 == 1 ? sorted : scratch.spare;
  SortInput in = {tokens, nullptr, sort.count, sort.range(), 0, sort.digit_bits};
  for (int pass = 0; pass < sort.passes; ++pass) {
    launch("sort_count", sort_count_kernel<kSortThreads>,
           {.grid = blocks, .block = kSortThreads, .stream = stream}, scratch.counts, in);
    launch("sort_sum", sort_sum_kernel<kMaxSortBlocks>,
           {.grid = digits, .block = threads_for_blocks, .stream = stream}, scratch.counts, totals,
           sort.blocks);
    launch("sort_move", sort_move_kernel<kSortThreads>,
           {.grid = blocks, .block = kSortThreads, .stream = stream}, out, scratch.counts, totals, in);
    in.occurrences = out;
    in.shift += sort.digit_bits;
    out = out == sorted ? scratch.spare : sorted;
  }
}

}  // namespace minillm::kernels
