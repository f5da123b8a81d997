// The transformer: which buffers it needs, and which kernels run on them in what order.
//
//   x[0] = embedding(tokens);  block i:  h = x + attention(norm1(x)),  x' = h + ffn(norm2(h));  logits =
//   head(norm(x))
//
// Residual additions ride in the GEMMs. Logits exist for `head_chunk` tokens at a time. Knows no rank:
// weights and gradients are flat buffers of a unit, whole, wherever they came from.
//
// A block's backward pass is one operation (kBackward), which needs least memory, or two kinds of them:
// kBackwardInput computes what the blocks before wait for, and leaves the gradients of the block's products
// in buffers of the block; kBackwardWeight computes a segment's weight gradients from those at any later
// time. Losses and gradients are bitwise the same either way, and with every Recompute.
//
// The head is kHeadLoss: all of it, forward and backward, chunk by chunk. Where its rows are one chunk, it
// may be two operations: kHeadLoss of the projection's segment, which ends with that segment's gradient and
// leaves the gradient of the logits; and kBackwardInput. Same bits again.
//
// Passes follow each other on one stream, so all share one set of scratch buffers: it costs what the most
// demanding operation needs, however many micro-batches a step has.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/dtype.h"
#include "cuda/gemm.h"
#include "kernels/attention.h"
#include "model/parameters.h"
#include "shard/layout.h"
#include "shard/program.h"

namespace minillm::model {

/// The work of one step on one rank.
struct BatchShape {
  int64_t batch = 0;          ///< sequences of a micro-batch
  int64_t sequence = 0;       ///< tokens per sequence
  int64_t head_chunk = 0;     ///< rows of logits at a time
  int64_t micro_batches = 1;  ///< per step; they share the activations' buffers
};

using config::Recompute;

/// How the blocks trade time for memory.
struct Recomputation {
  std::vector<Recompute> blocks = {};  ///< by block; empty: kCheap for all
  /// Blocks, from the first, that may have kBackwardInput and kBackwardWeight though they are kBlock: what
  /// they compute again gets a place of its own, as its last reader comes after other blocks' kRecompute.
  /// The other kBlock blocks share one place.
  int deferred_blocks = 0;
};

class Transformer {
 public:
  /// `layout` must come from units(model) and outlive this object. Throws InternalError when `recomputation`
  /// is about another number of blocks.
  Transformer(const config::Model& model, const BatchShape& shape, DType dtype, const shard::Layout& layout,
              const Recomputation& recomputation = {});

  const std::vector<shard::BufferSpec>& buffers() const { return buffers_; }

  // The model's operations: kForward of all units but the head; kHeadLoss; kBackward of the others;
  // kRecompute of kBlock blocks, between kForward and the backward pass; kBackwardInput and then
  // kBackwardWeight (of a BlockSegment, or -1: of all) of blocks; and where splits_head(), kHeadLoss of
  // projection_segment() and then kBackwardInput of the head, of kFinalNorm, or of -1 where there is none.
  // Each member throws InternalError for any other.

  /// Also for kUpload and kBegin, which write and read the inputs.
  shard::BufferUse uses(const shard::Operation& operation) const;
  /// Enqueues the operation on `stream`; all of one step on the same stream, with one `blas` for that stream.
  /// Reads *o.valid_count in kHeadLoss, which writes *o.loss_sum.
  void compute(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
               cudaStream_t stream) const;
  /// One entry for each kernel function (kernels/*.h) and product that compute() calls, in that order.
  std::vector<shard::KernelWork> work(const shard::Operation& operation) const;

  // Buffers that the caller fills: indices into buffers().
  int tokens() const { return tokens_; }          ///< [micro_batches, batch, sequence] int32
  int targets() const { return targets_; }        ///< [micro_batches, batch, sequence] int32
  int rope_table() const { return rope_table_; }  ///< once per run, with rope_table_values(); -1 without RoPE
  std::vector<float2> rope_table_values() const;

  /// Inference: logits of token `row` of the batch after the forward pass of all units but the head,
  /// into the first vocab_size elements of the buffer logits(), in the compute type.
  void logits_of(int64_t row, const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const;
  int logits() const { return wide_; }
  /// Buffers of logits_of().
  shard::BufferUse logits_uses() const;

  /// Whether the head's rows are one chunk, so that the gradient of all logits outlasts kHeadLoss.
  bool splits_head() const { return shape_.head_chunk >= rows_; }
  int projection_segment() const { return model_.final_norm ? kProjection : 0; }

  int unit_count() const { return static_cast<int>(model_.n_layers) + 2; }
  int head_unit() const { return unit_count() - 1; }

 private:
  // Indices into buffers_. -1: in scratch memory, so computed again where the backward pass needs it.
  struct Activations {
    int rstd1, qkv, attention, lse, middle, rstd2, pre_activation;
    int normed1 = -1, normed2 = -1, activation = -1;
  };
  static int or_scratch(int activation, int scratch) { return activation < 0 ? scratch : activation; }
  struct BlockBuffers {
    Recompute recompute;
    bool splits = true;           // whether it may have kBackwardInput
    Activations forward;          // written by the forward pass
    Activations saved;            // read by the backward pass; the same, but for kBlock
    int d_output, d_middle;       // left by kBackwardInput: gradients of the residual stream,
    int d_pre_activation, d_qkv;  // and of the products' outputs
  };
  struct BlockOffsets {  // of the slices in the unit's flat buffer, elements; equal for all blocks
    int64_t norm1, in_weight, in_bias, out_weight, out_bias, norm2, up, down;
  };
  struct ForwardPass;
  struct BackwardPass;
  struct HeadPass;
  class WorkList;

  int add(std::string name, int64_t bytes, shard::Purpose purpose);
  int add_rows(std::string name, int64_t columns, shard::Purpose purpose);
  void add_inputs();
  void add_block(int unit, const Recomputation& recomputation);
  Activations add_activations(const std::string& owner, bool norms_and_silu);
  void add_scratch();
  int64_t offset(int unit, const std::string& suffix) const;
  bool knows(const shard::Operation& operation) const;
  /// Throws InternalError unless it is one of the model's.
  void check(const shard::Operation& operation) const;

  void forward(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
               cudaStream_t stream) const;
  void head_loss(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
                 cudaStream_t stream) const;
  void head_backward_input(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
                           cudaStream_t stream) const;
  void backward(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
                cudaStream_t stream) const;
  void backward_embedding(const shard::Operation& operation, const shard::Operands& o,
                          cudaStream_t stream) const;
  /// What the head projects: `rows` rows of the residual stream, normalised when the model has a final norm.
  void* head_input(void* x, int64_t rows, const shard::Operands& o, cudaStream_t stream) const;
  /// The buffer logits() = in · head weightᵀ.
  void project(const void* in, int64_t rows, const shard::Operands& o, cuda::BlasLt& blas,
               cudaStream_t stream) const;
  /// Turns q and k of a packed QKV buffer by their positions, or back; nothing without RoPE.
  void rotate(void* qkv, bool inverse, const shard::Operands& o, cudaStream_t stream) const;
  /// The micro-batch's part of tokens() or targets().
  int32_t* ids(int buffer, const shard::Operation& operation, const shard::Operands& o) const;
  int64_t chunk_rows() const;  ///< rows of logits at a time, but for the last
  kernels::AttentionShape attention_shape() const;

  shard::BufferUse to_pre_activation_uses(int unit, const Activations& a, int scratch) const;
  shard::BufferUse forward_uses(int unit) const;
  shard::BufferUse head_loss_uses(bool whole) const;
  shard::BufferUse head_backward_input_uses() const;
  shard::BufferUse backward_uses(int unit) const;
  shard::BufferUse backward_input_uses(int unit) const;
  shard::BufferUse backward_weight_uses(int unit, int segment) const;

  config::Model model_;
  BatchShape shape_;
  DType dtype_;
  const shard::Layout& layout_;
  int64_t rows_;  // tokens of a micro-batch
  std::vector<shard::BufferSpec> buffers_;
  int tokens_ = -1, targets_ = -1, rope_table_ = -1;
  std::vector<int> input_;  // by unit, from 1: the residual stream before it
  // Gradient of the residual stream, handed from unit to unit. Until the head makes it, the scratch of the
  // forward pass for norm outputs, so that none is kept for them while the head runs.
  int d_residual_ = -1;
  std::vector<BlockBuffers> blocks_;    // by unit; entry 0 unused
  std::optional<Activations> passing_;  // of all kBlock blocks in turn
  // Scratch: rows as wide as the residual stream, as the FFN, QKV or logits; kernels' own; the head's.
  int narrow_ = -1, wide_ = -1, kernel_scratch_ = -1;
  int losses_ = -1, loss_scale_ = -1, final_rstd_ = -1;
  BlockOffsets block_{};
  int64_t head_weight_ = 0, head_norm_ = 0;  // offsets
};

}  // namespace minillm::model
