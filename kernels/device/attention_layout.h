// What the attention kernels share: the shape they are launched with and where the rows of a head lie.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/checked.h"
#include "kernels/attention.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// The rows of one head in a tensor that holds all heads of a position side by side.
template <class T>
struct HeadRows {
  T* first;     ///< row 0; all rows start on 16 bytes
  int stride;   ///< elements from one row to the next
  int columns;  ///< head size, a multiple of 8

  __device__ T* row(int r) const { return first + int64_t{r} * stride; }
};

/// What all attention kernels are launched with.
struct AttentionLayout {
  int64_t batch;
  int sequence, heads, kv_heads, head_size;
  float scale;
  bool causal;

  /// Heads of queries that share a head of keys and values.
  __host__ __device__ int group() const { return heads / kv_heads; }
};

/// The part of the grid that a block works on: grid.x is batch × heads × tiles, the only dimension of a grid
/// that cannot overflow. Blocks that read the same keys are neighbours, so that they meet in the L2 cache.
struct BlockPosition {
  int batch, head, tile;
};
__device__ inline BlockPosition block_position(int block, int heads, int tiles) {
  const int sequence = block / tiles;
  return {sequence / heads, sequence % heads, block % tiles};
}
inline unsigned attention_blocks(const AttentionLayout& layout, int heads, int tiles) {
  return static_cast<unsigned>(narrow<int32_t>(layout.batch * heads * tiles));
}

/// Rows of a head of q, k or v in the packed [batch, sequence, heads + 2 kv_heads, head_size] tensor.
enum class Part { kQuery, kKey, kValue };
template <class T>
__device__ inline HeadRows<T> packed_rows(T* qkv, const AttentionLayout& layout, int64_t batch, int head,
                                          Part part) {
  const int width = (layout.heads + 2 * layout.kv_heads) * layout.head_size;
  const int before = part == Part::kQuery ? 0
                     : part == Part::kKey ? layout.heads
                                          : layout.heads + layout.kv_heads;
  return {qkv + batch * layout.sequence * width + int64_t{before + head} * layout.head_size, width,
          layout.head_size};
}

/// Rows of a head in a [batch, sequence, heads, head_size] tensor.
template <class T>
__device__ inline HeadRows<T> plain_rows(T* x, const AttentionLayout& layout, int64_t batch, int head) {
  const int width = layout.heads * layout.head_size;
  return {x + batch * layout.sequence * width + int64_t{head} * layout.head_size, width, layout.head_size};
}

/// Index of a head's first value in a [batch, heads, sequence] tensor.
__host__ __device__ inline int64_t statistics_offset(const AttentionLayout& layout, int64_t batch,
                                                     int64_t head) {
  return (batch * layout.heads + head) * layout.sequence;
}

/// 8 adjacent elements, 16 bytes at a time.
template <class T>
__device__ inline Floats<8> load_eight(const T* from) {
  constexpr int kWidth = kFullWidth<T>;
  Floats<8> result;
#pragma unroll
  for (int start = 0; start < 8; start += kWidth) {
    const Floats<kWidth> part = load<kWidth>(from + start);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) result[start + i] = part[i];
  }
  return result;
}

/// What the backward kernels know of a row of probabilities, [batch, heads, sequence] each, in scratch
/// memory.
struct RowStatistics {
  float* lse;    ///< base 2
  float* delta;  ///< rowsum(dout ∘ out)
};

/// Calls body.operator()<D>() with the head size rounded up to a compiled one.
template <class Body>
void dispatch_head_size(int head_size, const Body& body) {
  if (head_size <= 32)
    body.template operator()<32>();
  else if (head_size <= 64)
    body.template operator()<64>();
  else
    body.template operator()<128>();
}

// The two implementations. Shapes have been checked; `row` is filled in.
void attention_forward_fp32(const AttentionForward& a, const AttentionLayout& layout, cudaStream_t stream);
void attention_forward_mma(const AttentionForward& a, const AttentionLayout& layout, cudaStream_t stream);
void attention_backward_fp32(const AttentionBackward& a, const AttentionLayout& layout,
                             const RowStatistics& row, cudaStream_t stream);
void attention_backward_mma(const AttentionBackward& a, const AttentionLayout& layout,
                            const RowStatistics& row, cudaStream_t stream);

}  // namespace minillm::kernels
