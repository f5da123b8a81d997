// Backward attention without atomics, in three launches: delta = rowsum(dout ∘ out), then one pass whose
// blocks own keys (dK, dV) and one whose blocks own queries (dQ). Each pass recomputes the probabilities from
// q, k and lse: seven tile products instead of five, in exchange for sums in a fixed order and no fp32 dQ in
// memory.
#include "kernels/attention.h"

#include <cmath>

#include "kernels/device/attention_tile.h"
#include "kernels/device/launch.h"
#include "kernels/device/shared.h"

namespace minillm::kernels {
namespace {

template <class T>
struct Arguments {
  T* dqkv;
  const T* dout;
  const T* qkv;
  const float* lse;
  const float* delta;  ///< [batch, heads, sequence]
  AttentionLayout layout;
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

template <class T>
__global__ void attention_delta_kernel(float* delta, const T* dout, const T* out, AttentionLayout layout) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;  // of [batch, sequence, heads]
  if (row >= layout.batch * layout.sequence * layout.heads) return;
  float sum = 0;
  for (int c = 0; c < layout.head_size; c += 8) {
    const Floats<8> x = load_eight(dout + row * layout.head_size + c, layout.vectorize);
    const Floats<8> y = load_eight(out + row * layout.head_size + c, layout.vectorize);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
  }
  const int64_t position = row / layout.heads;
  const int64_t head = position / layout.sequence * layout.heads + row % layout.heads;
  delta[head * layout.sequence + position % layout.sequence] = sum;
}

/// lse = +inf makes every probability of a query beyond the sequence 0.
template <int D>
__device__ void load_statistics(Tiles<D>& tiles, const float* lse, const float* delta, int first,
                                int queries) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile<D>; i += static_cast<int>(blockDim.x)) {
    tiles.lse[i] = i < queries ? lse[first + i] * kLog2E : INFINITY;
    tiles.delta[i] = i < queries ? delta[first + i] : 0.0f;
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

template <class T, int D, bool kOwnsKeys>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    attention_backward_kernel(Arguments<T> a) {
  constexpr int kRows = kTile<D> / kThreadRows, kScoreGroups = kTile<D> / kGroupColumns,
                kGroups = D / kGroupColumns;
  Tiles<D>& tiles = *dynamic_shared<Tiles<D>>();
  const AttentionLayout& layout = a.layout;
  BlockPosition at = block_position(layout);
  if (!kOwnsKeys)
    at.tile = layout.tiles - 1 - at.tile;  // with a causal mask: the longest work first, in both passes
  const int first_owned = at.tile * kTile<D>;
  const int owned = min(kTile<D>, layout.sequence - first_owned);
  const HeadRows<const T> query = packed_rows(a.qkv, layout, at, 0), key = packed_rows(a.qkv, layout, at, 1),
                          value = packed_rows(a.qkv, layout, at, 2), dout = plain_rows(a.dout, layout, at);
  const float* lse = a.lse + statistics_offset(layout, at);
  const float* delta = a.delta + statistics_offset(layout, at);

  load_transposed(tiles.owned[0], kOwnsKeys ? key : query, first_owned, owned);
  load_transposed(tiles.owned[1], kOwnsKeys ? value : dout, first_owned, owned);
  if (!kOwnsKeys) load_statistics(tiles, lse, delta, first_owned, owned);
  Gradient<D> dscore_sum{}, probability_sum{};

  const int begin = kOwnsKeys && layout.causal ? first_owned : 0;
  const int end = !kOwnsKeys && layout.causal ? first_owned + owned : layout.sequence;
  for (int first = begin; first < end; first += kTile<D>) {
    const int streamed = min(kTile<D>, end - first);
    if (first > begin) __syncthreads();  // all have used the previous tiles
    load_tile(tiles.streamed[0], kOwnsKeys ? query : key, first, streamed);
    load_tile(tiles.streamed[1], kOwnsKeys ? dout : value, first, streamed);
    if (kOwnsKeys) load_statistics(tiles, lse, delta, first, streamed);
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

  Floats<kRows> scale, one;
#pragma unroll
  for (int i = 0; i < kRows; ++i) scale[i] = layout.scale, one[i] = 1.0f;
  store_tile(packed_rows(a.dqkv, layout, at, kOwnsKeys ? 1 : 0), first_owned, owned, dscore_sum, scale);
  if constexpr (kOwnsKeys)
    store_tile(packed_rows(a.dqkv, layout, at, 2), first_owned, owned, probability_sum, one);
}

template <class T>
void launch_delta(const AttentionBackward& a, const AttentionLayout& layout, cudaStream_t stream) {
  const int64_t rows = layout.batch * layout.sequence * layout.heads;
  const auto blocks = static_cast<unsigned>(ceil_div(rows, kAttentionThreads));
  launch("attention_delta", attention_delta_kernel<T>, {blocks, kAttentionThreads, 0, stream}, a.scratch,
         static_cast<const T*>(a.dout), static_cast<const T*>(a.out), layout);
}

}  // namespace

void attention_backward(const AttentionBackward& a, cudaStream_t stream) {
  const int tile = a.shape.head_size <= 64 ? kTile<64> : kTile<128>;
  const AttentionLayout layout = attention_layout(a.shape, tile, {a.qkv, a.dqkv, a.dout, a.out});
  dispatch_attention(a.shape, [&]<class T, int D>() {
    launch_delta<T>(a, layout, stream);
    const unsigned threads = attention_threads(layout, kTile<D> / kThreadRows);
    const LaunchShape shape{attention_grid(layout), threads, sizeof(Tiles<D>), stream};
    const Arguments<T> arguments{static_cast<T*>(a.dqkv),
                                 static_cast<const T*>(a.dout),
                                 static_cast<const T*>(a.qkv),
                                 a.lse,
                                 a.scratch,
                                 layout};
    launch("attention_backward_keys", attention_backward_kernel<T, D, true>, shape, arguments);
    launch("attention_backward_queries", attention_backward_kernel<T, D, false>, shape, arguments);
  });
}

int64_t attention_backward_scratch(const AttentionShape& s) {
  return s.batch * s.heads * s.sequence * static_cast<int64_t>(sizeof(float));
}

Cost attention_backward_cost(const AttentionShape& s) {
  const int64_t rows = s.batch * s.sequence * s.heads;
  return {.bytes = rows * (8 * s.head_size * size_of(s.dtype) + 4),
          .flops = 10 * attention_pairs(s) * s.head_size};
}

}  // namespace minillm::kernels
