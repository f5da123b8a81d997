// Forward attention in fp32 on CUDA cores. A block owns 64 queries of one head and walks over the keys in
// tiles of 64 with an online softmax; scores and probabilities never leave the chip.
#include <cmath>

#include "kernels/device/attention_fp32.h"
#include "kernels/device/launch.h"
#include "kernels/device/shared.h"

namespace minillm::kernels {
namespace {

constexpr int kQueries = 64;
constexpr int kKeys = 64;
constexpr int kRows = kQueries / kThreadRows;
constexpr int kKeyGroups = kKeys / kGroupColumns;

struct Arguments {
  float* out;
  float* lse;
  const float* qkv;
  AttentionLayout layout;
  int tiles;  ///< blocks per head
};

template <int D>
struct Tiles {
  float query[kQueries][D];
  union {  // a key tile is dead once its scores are known: the value tile takes its place
    float key[D][kKeys];
    float value[kKeys][D];
  };
  float probability[kQueries][kKeys];
  float partial[kThreadColumns][kQueries];  ///< row statistics of each column of threads
};

using Scores = RegisterTile<kRows, kKeyGroups>;

/// Brings scores to base 2 and removes the pairs outside the mask: keys from `keys` on, or after the query.
__device__ void scale_and_mask(Scores& scores, float scale, bool masked, bool causal, int first_query,
                               int first_key, int keys) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int last = causal ? first_query + thread_row() * kRows + i - first_key : kKeys;
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = column_of(g) + j;
        scores.value[i][g][j] *= scale;
        if (masked && (key >= keys || key > last)) scores.value[i][g][j] = -INFINITY;
      }
  }
}

/// Combines what the 8 threads of a row left in `partial`, in the same order in each of them.
template <class Combine>
__device__ Floats<kRows> combine_partial(const float (&partial)[kThreadColumns][kQueries],
                                         Floats<kRows> result, Combine combine) {
#pragma unroll
  for (int column = 0; column < kThreadColumns; ++column) {
    const Floats<kRows> part = load<kRows>(&partial[column][thread_row() * kRows]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) result[i] = combine(result[i], part[i]);
  }
  return result;
}

/// This thread's maximum of each of its rows. fmaxf passes over NaN; the sum of probabilities will carry it.
__device__ Floats<kRows> row_maximum(const Scores& scores) {
  Floats<kRows> maximum;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    maximum[i] = -INFINITY;
#pragma unroll
    for (int g = 0; g < kKeyGroups; ++g)
#pragma unroll
      for (int j = 0; j < 4; ++j) maximum[i] = fmaxf(maximum[i], scores.value[i][g][j]);
  }
  return maximum;
}

template <int D>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocks)
    attention_forward_fp32_kernel(Arguments a) {
  constexpr int kGroups = D / kGroupColumns;
  Tiles<D>& tiles = *dynamic_shared<Tiles<D>>();
  const AttentionLayout& layout = a.layout;
  BlockPosition at = block_position(static_cast<int>(blockIdx.x), layout.heads, a.tiles);
  at.tile = a.tiles - 1 - at.tile;  // with a causal mask the last queries take longest: they start first
  const int first_query = at.tile * kQueries;
  const int queries = min(kQueries, layout.sequence - first_query);
  const int key_end = layout.causal ? first_query + queries : layout.sequence;
  const bool active = thread_row() * kRows < queries;
  const int kv_head = at.head / layout.group();
  const auto key = packed_rows(a.qkv, layout, at.batch, kv_head, Part::kKey),
             value = packed_rows(a.qkv, layout, at.batch, kv_head, Part::kValue);

  load_tile(tiles.query, packed_rows(a.qkv, layout, at.batch, at.head, Part::kQuery), first_query, queries);
  RegisterTile<kRows, kGroups> out{};
  Floats<kRows> maximum, sum{};
#pragma unroll
  for (int i = 0; i < kRows; ++i) maximum[i] = -INFINITY;

  for (int first_key = 0; first_key < key_end; first_key += kKeys) {
    const int keys = min(kKeys, key_end - first_key);
    if (first_key > 0) __syncthreads();  // all have used the previous values and probabilities
    load_transposed(tiles.key, key, first_key, keys);
    __syncthreads();

    Scores scores{};
    if (active) {
      add_product<kRows, kKeyGroups, D, kKeys>(scores, &tiles.query[0][0], &tiles.key[0][0],
                                               layout.head_size);
      const bool masked = keys < kKeys || (layout.causal && first_key + kKeys > first_query);
      scale_and_mask(scores, layout.scale * kLog2E, masked, layout.causal, first_query, first_key, keys);
      store(&tiles.partial[thread_column()][thread_row() * kRows], row_maximum(scores));
    }
    __syncthreads();
    load_tile(tiles.value, value, first_key, keys);

    if (active) {
      const Floats<kRows> previous = maximum;
      maximum = combine_partial(tiles.partial, maximum, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // Subtracting -inf from -inf would turn scores that only have probability 0 into NaN.
        const float reference = maximum[i] == -INFINITY ? 0.0f : maximum[i];
        const float decay = exp2f(previous[i] - reference);
        sum[i] *= decay;
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
          for (int j = 0; j < 4; ++j) out.value[i][g][j] *= decay;
#pragma unroll
        for (int g = 0; g < kKeyGroups; ++g) {
          Floats<4> probability;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            probability[j] = exp2f(scores.value[i][g][j] - reference);
            sum[i] += probability[j];
          }
          store(&tiles.probability[thread_row() * kRows + i][column_of(g)], probability);
        }
      }
    }
    __syncthreads();
    if (active)
      add_product<kRows, kGroups, kKeys, D>(out, &tiles.probability[0][0], &tiles.value[0][0],
                                            static_cast<int>(round_up(keys, 4)));
  }

  // All maxima of the last tile were read before its last barrier.
  if (active) store(&tiles.partial[thread_column()][thread_row() * kRows], sum);
  __syncthreads();
  if (!active) return;
  sum = combine_partial(tiles.partial, Floats<kRows>{}, [](float x, float y) { return x + y; });
  Floats<kRows> factor;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const bool empty = sum[i] == 0.0f;  // nothing but scores of -inf
    factor[i] = empty ? 0.0f : 1.0f / sum[i];
    const int row = thread_row() * kRows + i;
    if (thread_column() == 0 && row < queries)
      a.lse[statistics_offset(layout, at.batch, at.head) + first_query + row] =
          empty ? INFINITY : maximum[i] * kLn2 + logf(sum[i]);
  }
  store_tile(plain_rows(a.out, layout, at.batch, at.head), first_query, queries, out, factor);
}

}  // namespace

void attention_forward_fp32(const AttentionForward& a, const AttentionLayout& layout, cudaStream_t stream) {
  const int tiles = static_cast<int>(ceil_div(layout.sequence, kQueries));
  dispatch_head_size(layout.head_size, [&]<int D>() {
    launch("attention_forward", attention_forward_fp32_kernel<D>,
           {attention_blocks(layout, layout.heads, tiles), attention_threads(layout, kRows), sizeof(Tiles<D>),
            stream},
           Arguments{static_cast<float*>(a.out), a.lse, static_cast<const float*>(a.qkv), layout, tiles});
  });
}

}  // namespace minillm::kernels
