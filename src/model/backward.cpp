// The backward pass of the blocks and the embedding. On entry the residual gradient is that of a unit's
// output, on exit that of its input.
#include "core/checked.h"
#include "kernels/attention.h"
#include "kernels/bias_gradient.h"
#include "kernels/cast.h"
#include "kernels/embedding.h"
#include "kernels/rmsnorm.h"
#include "kernels/silu.h"
#include "model/flat.h"
#include "model/parameters.h"
#include "model/transformer.h"

namespace minillm::model {

using shard::OpKind;

/// The parts of a block's backward pass, those of its FFN first. Gradients are named after what they are of.
/// Where gradients of activations lie is the caller's choice: the fused and the split pass choose
/// differently.
struct Transformer::BackwardPass {
  const Transformer& t;
  int unit;
  bool accumulate;
  const shard::Operands& o;
  cuda::BlasLt& blas;
  cudaStream_t stream;

  const Activations& saved() const { return t.blocks_[unit].saved; }
  void* narrow_scratch() const { return buffer(o, t.narrow_); }
  void* wide_scratch() const { return buffer(o, t.wide_); }
  float* kernel_scratch() const { return buffer<float>(o, t.kernel_scratch_); }
  int64_t dim() const { return t.model_.dim; }
  int64_t ffn() const { return t.model_.ffn_dim; }
  const BlockOffsets& at() const { return t.block_; }

  // --- gradients of weights ------------------------------------------------------------------------------

  /// d_weight[out, in] (+)= d_outᵀ · in, in fp32, straight into the gradient buffer.
  void weight_gradient(int64_t offset, const void* d_out, int64_t out_columns, const void* in,
                       int64_t in_columns) const {
    float* d_weight = o.gradients + offset;
    blas.run({.m = out_columns,
              .n = in_columns,
              .k = t.rows_,
              .a = d_out,
              .transpose_a = true,
              .b = in,
              .d = d_weight,
              .c = d_weight,
              .beta = accumulate ? 1.0f : 0.0f,
              .input = t.dtype_,
              .output = DType::kFp32},
             stream);
  }
  void bias(int64_t offset, const void* d_out, int64_t columns) const {
    kernels::bias_gradient({.dbias = o.gradients + offset,
                            .dy = d_out,
                            .scratch = kernel_scratch(),
                            .rows = t.rows_,
                            .columns = narrow<int>(columns),
                            .dtype = t.dtype_,
                            .accumulate = accumulate},
                           stream);
  }
  /// A norm's output: saved, or computed again into scratch.
  const void* normed(int saved_normed, int x, int rstd, int64_t offset) const {
    if (saved_normed >= 0) return buffer(o, saved_normed);
    kernels::rmsnorm_recompute({.y = narrow_scratch(),
                                .rstd = buffer<float>(o, rstd),
                                .x = buffer(o, x),
                                .weight = weight(o, offset, t.dtype_),
                                .rows = t.rows_,
                                .columns = narrow<int>(dim()),
                                .dtype = t.dtype_},
                               stream);
    return narrow_scratch();
  }
  const void* activation() const {
    if (saved().activation >= 0) return buffer(o, saved().activation);
    kernels::silu_forward({.y = wide_scratch(),
                           .u = buffer(o, saved().pre_activation),
                           .count = t.rows_ * ffn(),
                           .dtype = t.dtype_},
                          stream);
    return wide_scratch();
  }

  void down_weight(const void* d_output) const {
    weight_gradient(at().down, d_output, dim(), activation(), ffn());
  }
  void up_weight(const void* d_pre_activation) const {
    const void* in = normed(saved().normed2, saved().middle, saved().rstd2, at().norm2);
    weight_gradient(at().up, d_pre_activation, ffn(), in, dim());
  }
  void attention_output_weights(const void* d_middle) const {
    weight_gradient(at().out_weight, d_middle, dim(), buffer(o, saved().attention), dim());
    bias(at().out_bias, d_middle, dim());
  }
  void attention_input_weights(const void* d_qkv) const {
    bias(at().in_bias, d_qkv, 3 * dim());
    const void* in = normed(saved().normed1, t.input_[unit], saved().rstd1, at().norm1);
    weight_gradient(at().in_weight, d_qkv, 3 * dim(), in, dim());
  }

  // --- gradients of activations ---------------------------------------------------------------------------

  /// d_in = d_out · weight.
  void input_gradient(void* d_in, int64_t in_columns, const void* d_out, int64_t out_columns,
                      int64_t offset) const {
    blas.run({.m = t.rows_,
              .n = in_columns,
              .k = out_columns,
              .a = d_out,
              .b = weight(o, offset, t.dtype_),
              .d = d_in,
              .input = t.dtype_,
              .output = t.dtype_},
             stream);
  }
  /// d_x = d_residual + gradient through the norm of x, with the gradient of the norm's weight. d_x may be
  /// d_normed or d_residual.
  void norm(void* d_x, const void* d_normed, const void* d_residual, int x, int rstd, int64_t offset) const {
    kernels::rmsnorm_backward({.dx = d_x,
                               .dweight = o.gradients + offset,
                               .dy = d_normed,
                               .x = buffer(o, x),
                               .weight = weight(o, offset, t.dtype_),
                               .rstd = buffer<float>(o, rstd),
                               .residual = d_residual,
                               .scratch = kernel_scratch(),
                               .rows = t.rows_,
                               .columns = narrow<int>(dim()),
                               .dtype = t.dtype_,
                               .accumulate = accumulate},
                              stream);
  }

  void to_pre_activation(void* d_pre_activation, const void* d_output) const {
    input_gradient(d_pre_activation, ffn(), d_output, dim(), at().down);
    kernels::silu_backward({.du = d_pre_activation,
                            .dy = d_pre_activation,
                            .u = buffer(o, saved().pre_activation),
                            .count = t.rows_ * ffn(),
                            .dtype = t.dtype_},
                           stream);
  }
  void to_middle(void* d_middle, void* d_normed, const void* d_pre_activation, const void* d_output) const {
    input_gradient(d_normed, dim(), d_pre_activation, ffn(), at().up);
    norm(d_middle, d_normed, d_output, saved().middle, saved().rstd2, at().norm2);
  }
  void to_qkv(void* d_qkv, void* d_attention, const void* d_middle) const {
    input_gradient(d_attention, dim(), d_middle, dim(), at().out_weight);
    kernels::attention_backward({.shape = t.attention_shape(),
                                 .dqkv = d_qkv,
                                 .dout = d_attention,
                                 .qkv = buffer(o, saved().qkv),
                                 .out = buffer(o, saved().attention),
                                 .lse = buffer<float>(o, saved().lse),
                                 .scratch = kernel_scratch()},
                                stream);
    t.rotate(d_qkv, /*inverse=*/true, o, stream);
  }
  void to_input(void* d_input, void* d_normed, const void* d_qkv, const void* d_middle) const {
    input_gradient(d_normed, dim(), d_qkv, 3 * dim(), at().in_weight);
    norm(d_input, d_normed, d_middle, t.input_[unit], saved().rstd1, at().norm1);
  }

  // --- operations -----------------------------------------------------------------------------------------

  /// In place, so the residual connections cost nothing; and each weight gradient as soon as possible, so
  /// that one wide and one narrow scratch do for all that lies between.
  void all() const {
    void* d = buffer(o, t.d_residual_);
    void* wide = wide_scratch();
    void* normed_or_gradient = narrow_scratch();
    down_weight(d);
    to_pre_activation(wide, d);
    up_weight(wide);
    to_middle(d, normed_or_gradient, wide, d);
    attention_output_weights(d);
    to_qkv(wide, normed_or_gradient, d);
    attention_input_weights(wide);
    to_input(d, normed_or_gradient, wide, d);
  }

  /// What weights() needs stays in buffers of the block, so d, which goes on to the block before, is copied;
  /// it is then scratch until its new value is known.
  void inputs() const {
    const BlockBuffers& b = t.blocks_[unit];
    void* d = buffer(o, t.d_residual_);
    void* d_output = buffer(o, b.d_output);
    void* d_middle = buffer(o, b.d_middle);
    void* d_pre_activation = buffer(o, b.d_pre_activation);
    void* d_qkv = buffer(o, b.d_qkv);
    kernels::cast(
        {.out = d_output, .in = d, .count = t.rows_ * dim(), .out_type = t.dtype_, .in_type = t.dtype_},
        stream);
    to_pre_activation(d_pre_activation, d_output);
    to_middle(d_middle, /*d_normed=*/d_middle, d_pre_activation, d_output);
    to_qkv(d_qkv, /*d_attention=*/d, d_middle);
    to_input(d, /*d_normed=*/d, d_qkv, d_middle);
  }

  void weights(int segment) const {
    const BlockBuffers& b = t.blocks_[unit];
    const auto wanted = [&](BlockSegment s) { return segment < 0 || segment == s; };
    if (wanted(kFeedForward)) {
      down_weight(buffer(o, b.d_output));
      up_weight(buffer(o, b.d_pre_activation));
    }
    if (wanted(kAttentionOutput)) attention_output_weights(buffer(o, b.d_middle));
    if (wanted(kAttentionInput)) attention_input_weights(buffer(o, b.d_qkv));
  }
};

void Transformer::backward(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
                           cudaStream_t stream) const {
  if (operation.unit == 0) return backward_embedding(operation, o, stream);
  const BackwardPass pass{*this, operation.unit, operation.accumulate, o, blas, stream};
  if (operation.kind == OpKind::kBackwardInput) return pass.inputs();
  if (operation.kind == OpKind::kBackwardWeight) return pass.weights(operation.segment);
  pass.all();
}

void Transformer::backward_embedding(const shard::Operation& operation, const shard::Operands& o,
                                     cudaStream_t stream) const {
  kernels::embedding_backward({.dtable = o.gradients,
                               .dout = buffer(o, d_residual_),
                               .tokens = ids(tokens_, operation, o),
                               .scratch = buffer(o, kernel_scratch_),
                               .count = rows_,
                               .vocabulary = model_.vocab_size,
                               .columns = narrow<int>(model_.dim),
                               .dtype = dtype_,
                               .accumulate = operation.accumulate},
                              stream);
}

}  // namespace minillm::model
