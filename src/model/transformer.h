// The transformer: which buffers it needs, and which kernels run on them in what order.
//
//   x[0] = embedding(tokens);  block i:  h = x + attention(norm1(x)),  x' = h + ffn(norm2(h));  logits =
//   head(norm(x))
//
// Saved per block for the backward pass: input, QKV, attention output, log-sum-exp, residual before the FFN,
// FFN pre-activation and the two rstd; norm outputs and SiLU are computed again. Residual additions ride in
// the GEMMs. Logits exist for `head_chunk` tokens at a time. Knows no rank: weights and gradients are flat
// buffers of a unit, whole, wherever they came from.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/dtype.h"
#include "cuda/gemm.h"
#include "kernels/attention.h"
#include "shard/layout.h"
#include "shard/program.h"

namespace minillm::model {

/// The work of one step on one rank.
struct BatchShape {
  int64_t batch = 0;       ///< sequences
  int64_t sequence = 0;    ///< tokens per sequence
  int64_t head_chunk = 0;  ///< rows of logits at a time
};

class Transformer {
 public:
  /// `layout` must come from units(model) and outlive this object.
  Transformer(const config::Model& model, const BatchShape& shape, DType dtype, const shard::Layout& layout);

  const std::vector<shard::BufferSpec>& buffers() const { return buffers_; }
  /// For kBegin (tokens and targets are written), kForward, kHeadLoss, kBackward.
  shard::BufferUse uses(shard::OpKind kind, int unit) const;

  // Buffers that the caller fills: indices into buffers().
  int tokens() const { return tokens_; }          ///< [batch, sequence] int32
  int targets() const { return targets_; }        ///< [batch, sequence] int32
  int rope_table() const { return rope_table_; }  ///< once per run, with rope_table_values(); -1 without RoPE
  std::vector<float2> rope_table_values() const;

  // Each enqueues on `stream`; all of one step on the same stream, with one `blas` for that stream.
  void forward(int unit, const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const;
  /// Loss, its sum, and the gradients of the head's weights and input. Reads *o.valid_count.
  void head_loss(const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const;
  void backward(int unit, const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const;

  /// Inference: logits of token `row` of the batch after forward() of all units but the head,
  /// into the first vocab_size elements of the buffer logits(), in the compute type.
  void logits_of(int64_t row, const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const;
  int logits() const { return head_.logits; }
  /// Buffers of logits_of().
  shard::BufferUse logits_uses() const;

  int unit_count() const { return static_cast<int>(model_.n_layers) + 2; }
  int head_unit() const { return unit_count() - 1; }

 private:
  struct BlockBuffers {  // indices into buffers_
    int rstd1, qkv, attention, lse, middle, rstd2, ffn;
    int forward_normed, forward_activation;
    int backward_wide, backward_normed, backward_d_normed, backward_scratch;
  };
  struct HeadBuffers {
    int rstd = -1, normed = -1;  // final norm only
    int logits, losses, scale, scratch;
  };
  struct BlockOffsets {  // of the slices in the unit's flat buffer, elements; equal for all blocks
    int64_t norm1, in_weight, in_bias, out_weight, out_bias, norm2, up, down;
  };

  int add(std::string name, int64_t bytes, shard::Purpose purpose);
  void add_block(int unit);
  void add_head();
  int64_t backward_scratch_bytes() const;
  int64_t offset(int unit, const std::string& suffix) const;
  void forward_block(int unit, const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const;
  void backward_ffn(int unit, const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const;
  void backward_attention(int unit, const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const;
  void backward_embedding(const shard::Operands& o, cudaStream_t stream) const;
  /// What the head projects: `rows` rows of the residual stream, normalised when the model has a final norm.
  void* head_input(void* x, int64_t rows, const shard::Operands& o, cudaStream_t stream) const;
  /// The buffer logits() = in · head weightᵀ.
  void project(const void* in, int64_t rows, const shard::Operands& o, cuda::BlasLt& blas,
               cudaStream_t stream) const;
  /// Turns q and k of a packed QKV buffer by their positions, or back; nothing without RoPE.
  void rotate(void* qkv, bool inverse, const shard::Operands& o, cudaStream_t stream) const;
  kernels::AttentionShape attention_shape() const;

  config::Model model_;
  BatchShape shape_;
  DType dtype_;
  const shard::Layout& layout_;
  int64_t rows_;  // tokens of the batch
  std::vector<shard::BufferSpec> buffers_;
  int tokens_ = -1, targets_ = -1, rope_table_ = -1;
  std::vector<int> input_;  // by unit, from 1: the residual stream before it
  int d_residual_ = -1;     // gradient of the residual stream
  int embedding_scratch_ = -1;
  std::vector<BlockBuffers> blocks_;  // by unit; entry 0 unused
  HeadBuffers head_{};
  BlockOffsets block_{};
  int64_t head_weight_ = 0, head_norm_ = 0;  // offsets
};

}  // namespace minillm::model
