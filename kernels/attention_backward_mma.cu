// Backward attention in bf16 on tensor cores, without atomics: one pass whose blocks own keys (dK, dV) and
// one whose blocks own queries (dQ). Both are one computation with the roles of queries and keys exchanged: a
// warp owns 16 rows of two tensors (K and V, or Q and dout), the rows of the other two stream past in tiles,
// and the probabilities and their gradients, recomputed from q, k and lse, never leave the warp's registers.
//
// Seven tile products instead of the five of a single pass. That pass would have all blocks of a head add to
// one dQ in fp32: in an order fixed by waiting for each other, which costs a fifth of its speed at best and
// wants blocks resident together, or into a copy of dQ each, which costs memory and its traffic.
#include <cmath>

#include "kernels/device/attention_layout.h"
#include "kernels/device/launch.h"
#include "kernels/device/mma_tile.h"
#include "kernels/device/shared.h"

namespace minillm::kernels {
namespace {

/// Warps of a block, and rows of a streamed tile: what registers and the 99 KiB of shared memory that every
/// supported GPU has admit.
template <int D>
inline constexpr int kWarps = D <= 64 ? 4 : 8;
template <int D>
inline constexpr int kOwned = 16 * kWarps<D>;
template <int D>
inline constexpr int kStreamed = D <= 64 ? 64 : 32;

struct Arguments {
  Bf16* dqkv;
  const Bf16* dout;
  const Bf16* qkv;
  RowStatistics row;
  AttentionLayout layout;
  int tiles;  ///< blocks per head
};

/// One of two buffers: while one is used the other is on its way.
template <int D>
struct Stage {
  Bf16 rows[2][kStreamed<D> * D];  ///< Q and dout, or K and V
  float lse[kStreamed<D>];         ///< of streamed queries, base 2
  float delta[kStreamed<D>];
};
template <int D>
struct alignas(128) Tiles {
  Bf16 owned[2][kOwned<D> * D];
  Stage<D> stage[2];
};
static_assert(sizeof(Tiles<64>) <= 99 * 1024 && sizeof(Tiles<128>) <= 99 * 1024);

/// A streamed tile: of which head, and its first row.
struct Position {
  int head, first;
};

template <int D, bool kOwnsKeys>
__device__ void copy_stage(Stage<D>& stage, const Arguments& a, int batch, const Position& at, int thread) {
  constexpr int kThreads = 32 * kWarps<D>;
  const AttentionLayout& layout = a.layout;
  const auto rows_of = [&](int head, Part part) { return packed_rows(a.qkv, layout, batch, head, part); };
  const auto copy = [&](int i, const HeadRows<const Bf16>& rows) {
    copy_rows<D, kStreamed<D>, kThreads>(stage.rows[i], rows, at.first, layout.sequence, thread);
  };
  if constexpr (kOwnsKeys) {
    copy(0, rows_of(at.head, Part::kQuery));
    copy(1, plain_rows(a.dout, layout, batch, at.head));
    if (thread < 2 * kStreamed<D>) {
      const int i = thread % kStreamed<D>;
      const bool first = thread < kStreamed<D>, exists = at.first + i < layout.sequence;
      const int64_t from = statistics_offset(layout, batch, at.head) + at.first + i;
      copy_async<4>(first ? stage.lse + i : stage.delta + i, (first ? a.row.lse : a.row.delta) + from,
                    exists);
    }
  } else {
    copy(0, rows_of(at.head / layout.group(), Part::kKey));
    copy(1, rows_of(at.head / layout.group(), Part::kValue));
  }
}

template <int D>
using Scores = float[1][kStreamed<D> / 8][4];

/// 0 where the key is after the query or the streamed row is not among the `streamed` of the sequence: its
/// score is not bounded by the other's lse. Rows are counted from the first of the streamed tile.
template <int D, bool kOwnsKeys>
__device__ void mask(Scores<D>& probability, bool causal, int first_row, int streamed) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + fragment_row() + 8 * half;
    const int begin = (kOwnsKeys && causal ? row : 0) - fragment_pair();
    const int end = (!kOwnsKeys && causal ? min(streamed, row + 1) : streamed) - fragment_pair();
#pragma unroll
    for (int j = 0; j < kStreamed<D> / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (8 * j + i < begin || 8 * j + i >= end) probability[0][j][2 * half + i] = 0.0f;
  }
}

/// values[i] of this lane's columns 8j + pair + i of the streamed tile.
__device__ inline Floats<2> of_columns(const float* values, int j) {
  return load<2>(values + 8 * j + fragment_pair());
}

template <int D, bool kOwnsKeys>
__global__ void __launch_bounds__(32 * kWarps<D>, D <= 64 ? 2 : 1)
    attention_backward_mma_kernel(Arguments a) {
  constexpr int kThreads = 32 * kWarps<D>, kTileRows = kStreamed<D>;
  auto& tiles = *dynamic_shared<Tiles<D>>();
  const AttentionLayout& layout = a.layout;
  BlockPosition at =
      block_position(static_cast<int>(blockIdx.x), kOwnsKeys ? layout.kv_heads : layout.heads, a.tiles);
  // With a causal mask the longest work starts first, in both passes.
  const int first_owned = (kOwnsKeys ? at.tile : a.tiles - 1 - at.tile) * kOwned<D>;
  const int warp_row = warp_index() * 16;
  const bool warp_exists = first_owned + warp_row < layout.sequence;

  int thread = static_cast<int>(threadIdx.x);
  const auto copy_owned = [&](int i, const HeadRows<const Bf16>& rows) {
    copy_rows<D, kOwned<D>, kThreads>(tiles.owned[i], rows, first_owned, layout.sequence, thread);
  };
  copy_owned(0, packed_rows(a.qkv, layout, at.batch, at.head, kOwnsKeys ? Part::kKey : Part::kQuery));
  if constexpr (kOwnsKeys)
    copy_owned(1, packed_rows(a.qkv, layout, at.batch, at.head, Part::kValue));
  else
    copy_owned(1, plain_rows(a.dout, layout, at.batch, at.head));

  // Keys take the heads of queries of their group one after another.
  const int begin = kOwnsKeys && layout.causal ? first_owned : 0;
  const int end =
      !kOwnsKeys && layout.causal ? min(first_owned + kOwned<D>, layout.sequence) : layout.sequence;
  const int last_head = kOwnsKeys ? (at.head + 1) * layout.group() - 1 : at.head;
  Position here = {kOwnsKeys ? at.head * layout.group() : at.head, begin};
  copy_stage<D, kOwnsKeys>(tiles.stage[0], a, at.batch, here, thread);
  commit_copies();

  float lse[2] = {}, delta[2] = {};  // of owned queries
  if constexpr (!kOwnsKeys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = first_owned + warp_row + fragment_row() + 8 * half;
      const int64_t i = statistics_offset(layout, at.batch, at.head) + query;
      if (query < layout.sequence) lse[half] = a.row.lse[i], delta[half] = a.row.delta[i];
    }
  }
  int row_lane = row_lane_offset<D>(), column_lane = column_lane_offset<D>();
  int owned_lane = warp_row * D + row_lane;
  const float scale = layout.scale * kLog2E;
  float dscore_sum[1][D / 8][4] = {}, probability_sum[1][D / 8][4] = {};

  for (int turn = 0;; turn ^= 1) {
    Position next = {here.head, here.first + kStreamed<D>};
    if (next.first >= end) next = {here.head + 1, begin};
    forget(at.batch);
    forget(thread);
    forget(row_lane);
    forget(column_lane);
    forget(owned_lane);
    wait_copies<0>();
    __syncthreads();  // this stage is there, and all have used the other
    if (next.head <= last_head) copy_stage<D, kOwnsKeys>(tiles.stage[turn ^ 1], a, at.batch, next, thread);
    commit_copies();

    const Stage<D>& stage = tiles.stage[turn];
    // Keys after all queries give nothing.
    const int first_row = first_owned + warp_row;
    const bool all_hidden =
        layout.causal && (kOwnsKeys ? here.first + kTileRows <= first_row : here.first >= first_row + 16);
    if (warp_exists && !all_hidden) {
      const auto load_owned = [&](int i) {
        return [&tiles, i, owned_lane](uint32_t(&fragment)[4], int, int k) {
          load_fragment<D>(fragment, tiles.owned[i], owned_lane, k);
        };
      };
      Scores<D> score, dprobability;
      product_with_rows<D, kStreamed<D>>(score, load_owned(0), stage.rows[0], column_lane);
#pragma unroll
      for (int j = 0; j < kTileRows / 8; ++j) {
        const Floats<2> of_query = kOwnsKeys ? of_columns(stage.lse, j) : Floats<2>{};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          score[0][j][i] = exp2_approx(score[0][j][i] * scale - (kOwnsKeys ? of_query[i % 2] : lse[i / 2]));
      }
      const bool crosses_diagonal = layout.causal && (kOwnsKeys ? here.first < first_owned + kOwned<D>
                                                                : here.first + kTileRows > first_owned);
      if (crosses_diagonal || here.first + kTileRows > layout.sequence)
        mask<D, kOwnsKeys>(score, layout.causal, first_owned + warp_row - here.first,
                           layout.sequence - here.first);

      product_with_rows<D, kStreamed<D>>(dprobability, load_owned(1), stage.rows[1], column_lane);
      uint32_t operand[kStreamed<D> / 16][1][4];
      if constexpr (kOwnsKeys) {
        pack_fragments(operand, score);
        add_product_with_columns<D>(probability_sum, operand, stage.rows[1], row_lane);
      }
#pragma unroll
      for (int j = 0; j < kTileRows / 8; ++j) {
        const Floats<2> of_query = kOwnsKeys ? of_columns(stage.delta, j) : Floats<2>{};
#pragma unroll
        for (int i = 0; i < 4; ++i)
          score[0][j][i] *= dprobability[0][j][i] - (kOwnsKeys ? of_query[i % 2] : delta[i / 2]);
      }
      pack_fragments(operand, score);
      add_product_with_columns<D>(dscore_sum, operand, stage.rows[0], row_lane);
    }
    if (next.head > last_head) break;
    here = next;
  }

  if (!warp_exists) return;
  int block = static_cast<int>(blockIdx.x);
  forget(block);  // so that the position is computed again, not kept in registers during the loop
  at = block_position(block, kOwnsKeys ? layout.kv_heads : layout.heads, a.tiles);
  const float scales[2] = {layout.scale, layout.scale}, ones[2] = {1.0f, 1.0f};
  const auto store_owned = [&](int i, Part part, const auto& sum, const float(&factor)[2]) {
    store_rows<D>(packed_rows(a.dqkv, layout, at.batch, at.head, part), first_owned + warp_row,
                  layout.sequence, sum[0], factor, tiles.owned[i] + warp_row * D);
  };
  store_owned(0, kOwnsKeys ? Part::kKey : Part::kQuery, dscore_sum, scales);
  if constexpr (kOwnsKeys) store_owned(1, Part::kValue, probability_sum, ones);
}

}  // namespace

void attention_backward_mma(const AttentionBackward& a, const AttentionLayout& layout,
                            const RowStatistics& row, cudaStream_t stream) {
  dispatch_head_size(layout.head_size, [&]<int D>() {
    const int tiles = static_cast<int>(ceil_div(layout.sequence, kOwned<D>));
    const auto shape = [&](int heads) {
      return LaunchShape{attention_blocks(layout, heads, tiles), 32 * kWarps<D>, sizeof(Tiles<D>), stream};
    };
    const Arguments arguments{static_cast<Bf16*>(a.dqkv),
                              static_cast<const Bf16*>(a.dout),
                              static_cast<const Bf16*>(a.qkv),
                              row,
                              layout,
                              tiles};
    launch("attention_backward_keys", attention_backward_mma_kernel<D, true>, shape(layout.kv_heads),
           arguments);
    launch("attention_backward_queries", attention_backward_mma_kernel<D, false>, shape(layout.heads),
           arguments);
  });
}

}  // namespace minillm::kernels
