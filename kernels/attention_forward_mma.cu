// Forward attention in bf16 on tensor cores (the algorithm of FlashAttention-2). A block of four warps owns
// up to 128 queries of one head and walks over the keys in tiles from the last to the first, so that
// the masked tiles come first. Each warp owns whole rows: its probabilities never leave its registers, and a
// row's maximum and sum concern four lanes. While scores are computed the values are on their way, and while
// those are used the next keys.
#include <cmath>

#include "kernels/device/attention_layout.h"
#include "kernels/device/launch.h"
#include "kernels/device/mma_tile.h"
#include "kernels/device/reduce.h"
#include "kernels/device/shared.h"

namespace minillm::kernels {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
/// Keys of a tile: scores of a warp's rows beside their output are what the registers hold.
template <int D>
inline constexpr int kKeys = D <= 64 ? 64 : 32;

struct Arguments {
  Bf16* out;
  float* lse;
  const Bf16* qkv;
  AttentionLayout layout;
  int tiles;  ///< blocks per head
};

template <int D, int kBlocks>
struct alignas(128) Tiles {
  Bf16 query[16 * kBlocks * kWarps * D];
  Bf16 key[kKeys<D> * D];
  Bf16 value[kKeys<D> * D];
};

/// A warp's rows: kBlocks blocks of 16, of which a lane holds two rows each.
template <int D, int kBlocks>
struct Rows {
  float out[kBlocks][D / 8][4] = {};
  float maximum[kBlocks][2];   ///< of the scores, not scaled
  float sum[kBlocks][2] = {};  ///< of this lane's probabilities relative to the maximum
};

template <int D, int kBlocks>
using Scores = float[kBlocks][kKeys<D> / 8][4];

/// -inf where the key is after the query or not among the `keys` of the tile. Queries are counted from its
/// first key.
template <int D, int kBlocks>
__device__ void mask(Scores<D, kBlocks>& score, bool causal, int first_query, int keys) {
#pragma unroll
  for (int r = 0; r < kBlocks; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_query + 16 * r + fragment_row() + 8 * half;
      const int end = (causal ? min(keys, query + 1) : keys) - fragment_pair();
#pragma unroll
      for (int j = 0; j < kKeys<D> / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (8 * j + i >= end) score[r][j][2 * half + i] = -INFINITY;
    }
}

/// Scores to probabilities relative to the new maximum; what was relative to the old one shrinks. `scale`
/// brings scores to base 2. fmaxf passes over NaN: the sum carries it.
template <int D, int kBlocks>
__device__ void soften(Scores<D, kBlocks>& score, Rows<D, kBlocks>& rows, float scale) {
  float factor[kBlocks][2];
  bool decays = false;
#pragma unroll
  for (int r = 0; r < kBlocks; ++r)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float maximum = rows.maximum[r][half];
#pragma unroll
      for (int j = 0; j < kKeys<D> / 8; ++j)
        maximum = fmaxf(maximum, fmaxf(score[r][j][2 * half], score[r][j][2 * half + 1]));
      maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(kAllLanes, maximum, 2));
      // Subtracting -inf from -inf would turn scores that only have probability 0 into NaN.
      const float reference = maximum == -INFINITY ? 0.0f : maximum * scale;
      const float decay = exp2_approx(rows.maximum[r][half] * scale - reference);
      rows.maximum[r][half] = maximum;
      float sum = rows.sum[r][half] * decay;
#pragma unroll
      for (int j = 0; j < kKeys<D> / 8; ++j)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          score[r][j][i] = exp2_approx(score[r][j][i] * scale - reference);
          sum += score[r][j][i];
        }
      rows.sum[r][half] = sum;
      factor[r][half] = decay;
      decays |= decay != 1.0f;
    }
  if (!__any_sync(kAllLanes, decays)) return;  // most maxima are found early
#pragma unroll
  for (int r = 0; r < kBlocks; ++r)
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.out[r][j][i] *= factor[r][i / 2];
}

template <int D, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks == 1 && D <= 64 ? 3 : 2)
    attention_forward_mma_kernel(Arguments a) {
  constexpr int kQueries = 16 * kBlocks * kWarps;
  auto& tiles = *dynamic_shared<Tiles<D, kBlocks>>();
  const AttentionLayout& layout = a.layout;
  BlockPosition at = block_position(static_cast<int>(blockIdx.x), layout.heads, a.tiles);
  at.tile = a.tiles - 1 - at.tile;  // with a causal mask the last queries take longest: they start first
  const int first_query = at.tile * kQueries;
  const int end_query = min(first_query + kQueries, layout.sequence);
  const int key_end = layout.causal ? end_query : layout.sequence;
  const int warp_row = warp_index() * 16 * kBlocks;
  const int warp_query = first_query + warp_row;
  const bool warp_exists = warp_query < layout.sequence;

  const int kv_head = at.head / layout.group();
  const auto key = packed_rows(a.qkv, layout, at.batch, kv_head, Part::kKey),
             value = packed_rows(a.qkv, layout, at.batch, kv_head, Part::kValue);
  int thread = static_cast<int>(threadIdx.x);
  int tile = (key_end - 1) / kKeys<D>;
  copy_rows<D, kQueries, kThreads>(tiles.query, packed_rows(a.qkv, layout, at.batch, at.head, Part::kQuery),
                                   first_query, layout.sequence, thread);
  copy_rows<D, kKeys<D>, kThreads>(tiles.key, key, tile * kKeys<D>, layout.sequence, thread);
  commit_copies();

  int row_lane = row_lane_offset<D>(), column_lane = column_lane_offset<D>();
  int query_lane = warp_row * D + row_lane;
  const float scale = layout.scale * kLog2E;
  Rows<D, kBlocks> rows;
#pragma unroll
  for (int r = 0; r < kBlocks; ++r) rows.maximum[r][0] = rows.maximum[r][1] = -INFINITY;

  // Tiles that the diagonal or the end of the sequence crosses.
  const int first_masked = layout.causal ? first_query / kKeys<D> : layout.sequence / kKeys<D>;
  for (; tile >= 0; --tile) {
    const int first_key = tile * kKeys<D>;
    forget(thread);
    forget(query_lane);
    forget(row_lane);
    forget(column_lane);
    wait_copies<0>();
    __syncthreads();  // keys are there, and all have used the previous values
    copy_rows<D, kKeys<D>, kThreads>(tiles.value, value, first_key, layout.sequence, thread);
    commit_copies();

    // Keys after all of the warp's queries give nothing.
    const bool sees_keys = warp_exists && (!layout.causal || first_key < warp_query + 16 * kBlocks);
    Scores<D, kBlocks> score;
    if (sees_keys) {
      const auto load_query = [&](uint32_t(&fragment)[4], int r, int k) {
        load_fragment<D>(fragment, tiles.query + 16 * r * D, query_lane, k);
      };
      product_with_rows<D, kKeys<D>>(score, load_query, tiles.key, column_lane);
      if (tile >= first_masked)
        mask<D, kBlocks>(score, layout.causal, warp_query - first_key, layout.sequence - first_key);
    }
    wait_copies<0>();
    __syncthreads();  // values are there, and all have used the keys
    if (tile > 0)
      copy_rows<D, kKeys<D>, kThreads>(tiles.key, key, first_key - kKeys<D>, layout.sequence, thread);
    commit_copies();

    if (sees_keys) {
      soften(score, rows, scale);
      uint32_t probability[kKeys<D> / 16][kBlocks][4];
      pack_fragments(probability, score);
      add_product_with_columns<D>(rows.out, probability, tiles.value, row_lane);
    }
  }

  if (!warp_exists) return;
  int block = static_cast<int>(blockIdx.x);
  forget(block);  // so that the position is computed again, not kept in registers during the loop
  at = block_position(block, layout.heads, a.tiles);
  const auto target = plain_rows(a.out, layout, at.batch, at.head);
  float* const lse = a.lse + statistics_offset(layout, at.batch, at.head);
#pragma unroll
  for (int r = 0; r < kBlocks; ++r) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = rows.sum[r][half];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      const bool empty = sum == 0.0f;  // nothing but scores of -inf
      factor[half] = empty ? 0.0f : 1.0f / sum;
      const int row = warp_query + 16 * r + fragment_row() + 8 * half;
      if (fragment_pair() == 0 && row < layout.sequence)
        lse[row] = empty ? INFINITY : rows.maximum[r][half] * layout.scale + logf(sum);
    }
    store_rows<D>(target, warp_query + 16 * r, layout.sequence, rows.out[r], factor,
                  tiles.query + (warp_row + 16 * r) * D);
  }
}

template <int D, int kBlocks>
void launch_forward(const AttentionForward& a, const AttentionLayout& layout, cudaStream_t stream) {
  const int tiles = static_cast<int>(ceil_div(layout.sequence, 16 * kBlocks * kWarps));
  launch("attention_forward", attention_forward_mma_kernel<D, kBlocks>,
         {attention_blocks(layout, layout.heads, tiles), kThreads, sizeof(Tiles<D, kBlocks>), stream},
         Arguments{static_cast<Bf16*>(a.out), a.lse, static_cast<const Bf16*>(a.qkv), layout, tiles});
}

}  // namespace

/// Two blocks of rows per warp read shared memory half as often per product; one fills a GPU with half the
/// work, and two blocks of the grid fit an SM whose shared memory is small. A row's bits do not depend on the
/// choice.
void attention_forward_mma(const AttentionForward& a, const AttentionLayout& layout, cudaStream_t stream) {
  const int64_t wide_blocks = layout.batch * layout.heads * ceil_div(layout.sequence, 32 * kWarps);
  dispatch_head_size(layout.head_size, [&]<int D>() {
    if (layout.sequence > 16 * kWarps && wide_blocks >= device_attribute(cudaDevAttrMultiProcessorCount) &&
        (D <= 64 || device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= 128 * 1024))
      launch_forward<D, 2>(a, layout, stream);
    else
      launch_forward<D, 1>(a, layout, stream);
  });
}

}  // namespace minillm::kernels
