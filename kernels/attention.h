// Scaled dot-product attention on the packed QKV tensor that the projection GEMM wrote, without ever holding
// a sequence × sequence matrix (Dao et al., FlashAttention, 2022; FlashAttention-2, 2023).
//   out[b,t,h,:] = softmax_s(q[b,t,h,:]·k[b,s,g,:] · scale) v[b,s,g,:],  s <= t only when causal
// where g = h / (heads / kv_heads): grouped-query attention (Ainslie et al. 2023) when there are fewer heads
// of keys and values than of queries.
//
// bf16 runs on tensor cores: products of bf16 accumulated in fp32, softmax statistics in fp32, probabilities
// and their gradients rounded to bf16 as operands of the next product. fp32 runs on CUDA cores in fp32
// throughout. Deterministic: no atomics; dQ has a pass of its own.
//
// A score of -inf has probability 0. A row of nothing else has out 0, lse +inf and gives no gradient. NaN is
// never lost; one in v or dout may also reach rows that a causal mask hides it from.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

struct AttentionShape {
  int64_t batch = 0;
  int sequence = 0;
  int heads = 0;
  int head_size = 0;  ///< a multiple of 8, at most 128
  bool causal = false;
  float scale = 0;  ///< positive; usually 1/sqrt(head_size)
  DType dtype = DType::kBf16;
  int kv_heads = 0;  ///< heads of keys and of values, a divisor of `heads`; 0: as many as `heads`
};

struct AttentionForward {
  AttentionShape shape;
  void* out = nullptr;        ///< [batch, sequence, heads, head_size] dtype, written
  float* lse = nullptr;       ///< [batch, heads, sequence] natural log of the softmax denominator, written
  const void* qkv = nullptr;  ///< [batch, sequence, heads + 2 kv_heads, head_size] dtype: q, k, v
};
/// Throws UsageError for a shape or an alignment that is not allowed, DeviceError when the launch fails.
void attention_forward(const AttentionForward& a, cudaStream_t stream);
Cost attention_forward_cost(const AttentionShape& shape);

struct AttentionBackward {
  AttentionShape shape;
  void* dqkv = nullptr;        ///< laid out as qkv, written; no aliasing
  const void* dout = nullptr;  ///< [batch, sequence, heads, head_size] dtype
  const void* qkv = nullptr;   ///< as in the forward pass
  const void* out = nullptr;   ///< as the forward pass wrote it
  const float* lse = nullptr;  ///< as the forward pass wrote it
  float* scratch = nullptr;    ///< attention_backward_scratch() bytes, any contents
};
void attention_backward(const AttentionBackward& a, cudaStream_t stream);
int64_t attention_backward_scratch(const AttentionShape& shape);
Cost attention_backward_cost(const AttentionShape& shape);

}  // namespace minillm::kernels
