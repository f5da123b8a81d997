// Backward attention in fp32 on CUDA cores, without atomics: one pass whose blocks own keys (dK, dV) and one
// whose blocks own queries (dQ). Each recomputes the probabilities from q, k and lse: seven tile products
// instead of five, in exchange for sums in a fixed order and no dQ that many blocks add to.
#include <cmath>

#include "kernels/device/attention_fp32.h"
#include "kernels/device/launch.h"
#include "kernels/device/shared.h"

namespace minillm::kernels {
namespace {

struct Arguments {
  float* dqkv;
  const float* dout;
  const float* qkv;
  RowStatistics row;
  AttentionLayout layout;
  int tiles;  ///< blocks per head
};

/// Queries and keys of a tile: the most with which four operand tiles fit beside the probabilities in the 99
/// KiB that a block may have on every supported GPU.
template <int D>
inline constexpr int kTile = D <= 64 ? 64 : 32;

/// Both passes are one computation with the roles of queries and keys exchanged: a block owns `kTile` rows of
/// two tensors (K and V, or Q and dout), kept transposed, and streams the rows of the other two past them.
template <int D>
struct Tiles {
  float owned[2][D][kTile<D>];
  float streamed[2][kTile<D>][D];
  float probability[kTile<D>][kTile<D>];  ///< [streamed][owned]
  float dscore[kTile<D>][kTile<D>];
  float lse[kTile<D>];  ///< base 2, of the queries at hand
  float delta[kTile<D>];
};
static_assert(sizeof(Tiles<64>) <= 99 * 1024 && sizeof(Tiles<128>) <= 99 * 1024);

template <int D>
using Scores = RegisterTile<kTile<D> / kThreadRows, kTile<D> / kGroupColumns>;
template <int D>
using Gradient = RegisterTile<kTile<D> / kThreadRows, D / kGroupColumns>;

/// lse = +inf makes every probability of a query beyond the sequence 0.
template <int D>
__device__ void load_statistics(Tiles<D>& tiles, const RowStatistics& row, int64_t offset, int first,
                                int queries) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile<D>; i += static_cast<int>(blockDim.x)) {
    tiles.lse[i] = i < queries ? row.lse[offset + first + i] : INFINITY;
    tiles.delta[i] = i < queries ? row.delta[offset + first + i] : 0.0f;
  }
}

/// From the products of a pair of tiles to probabilities p and score gradients p (dp - delta), in shared
/// memory.
template <int D, bool kOwnsKeys>
__device__ void store_scores(Tiles<D>& tiles, const Scores<D>& score, const Scores<D>& dprobability,
                             const AttentionLayout& layout, int first_owned, int first_streamed) {
  constexpr int kRows = kTile<D> / kThreadRows;
  const float scale = layout.scale * kLog2E;
  const int first_query = kOwnsKeys ? first_streamed : first_owned;
  const int first_key = kOwnsKeys ? first_owned : first_streamed;
  const bool masked =
      first_key + kTile<D> > layout.sequence || (layout.causal && first_key + kTile<D> > first_query);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = thread_row() * kRows + i;
#pragma unroll
    for (int g = 0; g < kTile<D> / kGroupColumns; ++g) {
      Floats<4> probability, dscore;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = column_of(g) + j;
        const int query = kOwnsKeys ? row : column, key = kOwnsKeys ? column : row;
        probability[j] = exp2f(score.value[i][g][j] * scale - tiles.lse[query]);
        const bool visible =
            first_key + key < layout.sequence && (!layout.causal || first_key + key <= first_query + query);
        if (masked && !visible) probability[j] = 0.0f;
        dscore[j] = probability[j] * (dprobability.value[i][g][j] - tiles.delta[query]);
      }
      if constexpr (kOwnsKeys) store(&tiles.probability[row][column_of(g)], probability);
      store(&tiles.dscore[row][column_of(g)], dscore);
    }
  }
}

/// Blocks that own keys belong to a head of keys and take the heads of queries of its group one after
/// another.
template <int D, bool kOwnsKeys>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    attention_backward_fp32_kernel(Arguments a) {
  constexpr int kRows = kTile<D> / kThreadRows, kScoreGroups = kTile<D> / kGroupColumns,
                kGroups = D / kGroupColumns;
  Tiles<D>& tiles = *dynamic_shared<Tiles<D>>();
  const AttentionLayout& layout = a.layout;
  BlockPosition at =
      block_position(static_cast<int>(blockIdx.x), kOwnsKeys ? layout.kv_heads : layout.heads, a.tiles);
  if (!kOwnsKeys)
    at.tile = a.tiles - 1 - at.tile;  // with a causal mask: the longest work first, in both passes
  const int first_owned = at.tile * kTile<D>;
  const int owned = min(kTile<D>, layout.sequence - first_owned);
  const int kv_head = kOwnsKeys ? at.head : at.head / layout.group();
  const auto key = packed_rows(a.qkv, layout, at.batch, kv_head, Part::kKey),
             value = packed_rows(a.qkv, layout, at.batch, kv_head, Part::kValue);

  const int first_head = kOwnsKeys ? at.head * layout.group() : at.head;
  const int heads = kOwnsKeys ? layout.group() : 1;
  const int begin = kOwnsKeys && layout.causal ? first_owned : 0;
  const int end = !kOwnsKeys && layout.causal ? first_owned + owned : layout.sequence;
  Gradient<D> dscore_sum{}, probability_sum{};
  for (int head = first_head; head < first_head + heads; ++head) {
    const auto query = packed_rows(a.qkv, layout, at.batch, head, Part::kQuery),
               dout = plain_rows(a.dout, layout, at.batch, head);
    const int64_t statistics = statistics_offset(layout, at.batch, head);
    if (head == first_head) {
      load_transposed(tiles.owned[0], kOwnsKeys ? key : query, first_owned, owned);
      load_transposed(tiles.owned[1], kOwnsKeys ? value : dout, first_owned, owned);
      if (!kOwnsKeys) load_statistics(tiles, a.row, statistics, first_owned, owned);
    }
    for (int first = begin; first < end; first += kTile<D>) {
      const int streamed = min(kTile<D>, end - first);
      if (first > begin || head > first_head) __syncthreads();  // all have used the previous tiles
      load_tile(tiles.streamed[0], kOwnsKeys ? query : key, first, streamed);
      load_tile(tiles.streamed[1], kOwnsKeys ? dout : value, first, streamed);
      if (kOwnsKeys) load_statistics(tiles, a.row, statistics, first, streamed);
      __syncthreads();

      if (thread_row() * kRows < streamed) {
        Scores<D> score{}, dprobability{};
        add_product<kRows, kScoreGroups, D, kTile<D>>(score, &tiles.streamed[0][0][0], &tiles.owned[0][0][0],
                                                      layout.head_size);
        add_product<kRows, kScoreGroups, D, kTile<D>>(dprobability, &tiles.streamed[1][0][0],
                                                      &tiles.owned[1][0][0], layout.head_size);
        store_scores<D, kOwnsKeys>(tiles, score, dprobability, layout, first_owned, first);
      }
      __syncthreads();
      if (thread_row() * kRows < owned) {
        add_transposed_product<kRows, kGroups, kTile<D>, D>(dscore_sum, &tiles.dscore[0][0],
                                                            &tiles.streamed[0][0][0], streamed);
        if constexpr (kOwnsKeys)
          add_transposed_product<kRows, kGroups, kTile<D>, D>(probability_sum, &tiles.probability[0][0],
                                                              &tiles.streamed[1][0][0], streamed);
      }
    }
  }

  Floats<kRows> scale, one;
#pragma unroll
  for (int i = 0; i < kRows; ++i) scale[i] = layout.scale, one[i] = 1.0f;
  const auto target = [&](Part part) { return packed_rows(a.dqkv, layout, at.batch, at.head, part); };
  store_tile(target(kOwnsKeys ? Part::kKey : Part::kQuery), first_owned, owned, dscore_sum, scale);
  if constexpr (kOwnsKeys) store_tile(target(Part::kValue), first_owned, owned, probability_sum, one);
}

}  // namespace

void attention_backward_fp32(const AttentionBackward& a, const AttentionLayout& layout,
                             const RowStatistics& row, cudaStream_t stream) {
  dispatch_head_size(layout.head_size, [&]<int D>() {
    const int tiles = static_cast<int>(ceil_div(layout.sequence, kTile<D>));
    const unsigned threads = attention_threads(layout, kTile<D> / kThreadRows);
    const auto shape = [&](int heads) {
      return LaunchShape{attention_blocks(layout, heads, tiles), threads, sizeof(Tiles<D>), stream};
    };
    const Arguments arguments{static_cast<float*>(a.dqkv),
                              static_cast<const float*>(a.dout),
                              static_cast<const float*>(a.qkv),
                              row,
                              layout,
                              tiles};
    launch("attention_backward_keys", attention_backward_fp32_kernel<D, true>, shape(layout.kv_heads),
           arguments);
    launch("attention_backward_queries", attention_backward_fp32_kernel<D, false>, shape(layout.heads),
           arguments);
  });
}

}  // namespace minillm::kernels
