// What attention is before it is fp32 or bf16: checks, costs, and the statistics that the backward pass needs
// of each row.
#include "kernels/attention.h"

#include <cmath>
#include <initializer_list>
#include <string>

#include "core/checked.h"
#include "core/error.h"
#include "kernels/device/attention_layout.h"
#include "kernels/device/launch.h"
#include "kernels/device/reduce.h"

namespace minillm::kernels {
namespace {

int kv_heads_of(const AttentionShape& s) {
  return s.kv_heads == 0 ? s.heads : s.kv_heads;
}

AttentionLayout checked_layout(const AttentionShape& s, std::initializer_list<const void*> tensors) {
  if (s.head_size < 8 || s.head_size > 128 || s.head_size % 8 != 0)
    throw UsageError(
        "attention: head size " + std::to_string(s.head_size) +
        " is not supported; choose model.dim and model.n_heads so that dim / n_heads is a multiple of 8 "
        "from 8 to 128");
  if (s.heads <= 0 || kv_heads_of(s) < 0 || s.heads % kv_heads_of(s) != 0)
    throw UsageError("attention: " + std::to_string(s.heads) + " heads of queries cannot share " +
                     std::to_string(s.kv_heads) +
                     " heads of keys and values: the second number must divide the first");
  if (!(s.scale > 0) || !std::isfinite(s.scale))
    throw UsageError("attention: scale " + std::to_string(s.scale) + " is not a positive number");
  if (!can_vectorize(tensors))
    throw UsageError("attention: a tensor does not start on a multiple of 16 bytes; it must");
  return {s.batch, s.sequence, s.heads, kv_heads_of(s), s.head_size, s.scale, s.causal};
}

/// Elements of one row of q, of k and of v.
int64_t packed_width(const AttentionShape& s) {
  return int64_t{s.heads + 2 * kv_heads_of(s)} * s.head_size;
}

int64_t rows_of(const AttentionShape& s) {
  return s.batch * s.sequence * s.heads;
}

/// Pairs of a query and a key that it attends to, over the whole batch and all heads.
int64_t pairs_of(const AttentionShape& s) {
  const int64_t t = s.sequence;
  return s.batch * s.heads * (s.causal ? t * (t + 1) / 2 : t * t);
}

constexpr int kStatisticsThreads = 128;

/// kLanes threads read a row of a head, a chunk of 8 elements at a time; a block takes adjacent rows of one
/// head, whose statistics are adjacent.
template <class T, int kLanes>
__global__ void __launch_bounds__(kStatisticsThreads)
    attention_statistics_kernel(RowStatistics row, const T* dout, const T* out, const float* lse,
                                AttentionLayout layout, int tiles) {
  constexpr int kRows = kStatisticsThreads / kLanes;
  const BlockPosition at = block_position(static_cast<int>(blockIdx.x), layout.heads, tiles);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int position = at.tile * kRows + static_cast<int>(threadIdx.x) / kLanes;
  float sum = 0;
  if (position < layout.sequence) {
    const T* x = plain_rows(dout, layout, at.batch, at.head).row(position);
    const T* y = plain_rows(out, layout, at.batch, at.head).row(position);
    for (int c = lane * 8; c < layout.head_size; c += kLanes * 8) {
      const Floats<8> left = load_eight(x + c), right = load_eight(y + c);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += left[i] * right[i];
    }
  }
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  if (lane != 0 || position >= layout.sequence) return;
  const int64_t i = statistics_offset(layout, at.batch, at.head) + position;
  row.delta[i] = sum;
  row.lse[i] = lse[i] * kLog2E;
}

void row_statistics(const AttentionBackward& a, const AttentionLayout& layout, const RowStatistics& row,
                    cudaStream_t stream) {
  constexpr int kLanes = 8, kRows = kStatisticsThreads / kLanes;
  dispatch(a.shape.dtype, [&]<class T>() {
    const int tiles = static_cast<int>(ceil_div(layout.sequence, kRows));
    launch("attention_statistics", attention_statistics_kernel<T, kLanes>,
           {attention_blocks(layout, layout.heads, tiles), kStatisticsThreads, 0, stream}, row,
           static_cast<const T*>(a.dout), static_cast<const T*>(a.out), a.lse, layout, tiles);
  });
}

}  // namespace

void attention_forward(const AttentionForward& a, cudaStream_t stream) {
  const AttentionLayout layout = checked_layout(a.shape, {a.qkv, a.out});
  if (a.shape.dtype == DType::kBf16)
    attention_forward_mma(a, layout, stream);
  else
    attention_forward_fp32(a, layout, stream);
}

void attention_backward(const AttentionBackward& a, cudaStream_t stream) {
  const AttentionLayout layout = checked_layout(a.shape, {a.qkv, a.dqkv, a.dout, a.out});
  const RowStatistics row{a.scratch, a.scratch + rows_of(a.shape)};
  row_statistics(a, layout, row, stream);
  if (a.shape.dtype == DType::kBf16)
    attention_backward_mma(a, layout, row, stream);
  else
    attention_backward_fp32(a, layout, row, stream);
}

int64_t attention_backward_scratch(const AttentionShape& s) {
  return 2 * rows_of(s) * static_cast<int64_t>(sizeof(float));
}

Cost attention_forward_cost(const AttentionShape& s) {
  const int64_t qkv = s.batch * s.sequence * packed_width(s), out = rows_of(s) * s.head_size;
  return {.bytes = (qkv + out) * size_of(s.dtype) + rows_of(s) * 4, .flops = 4 * pairs_of(s) * s.head_size};
}

/// Beyond the minimum: the statistics, written and read by both passes, and qkv and dout, which the second
/// pass reads again and the statistics' kernel half of.
Cost attention_backward_cost(const AttentionShape& s) {
  const int64_t qkv = s.batch * s.sequence * packed_width(s), out = rows_of(s) * s.head_size;
  return {.bytes = (2 * qkv + 2 * out) * size_of(s.dtype) + rows_of(s) * 4,
          .flops = 10 * pairs_of(s) * s.head_size,
          .extra_bytes = (qkv + 2 * out) * size_of(s.dtype) + 3 * attention_backward_scratch(s)};
}

}  // namespace minillm::kernels
