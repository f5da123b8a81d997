// The backward pass of the blocks and the embedding. On entry the residual gradient is that of a unit's
// output, on exit that of its input: it is updated in place, so the residual connections cost nothing.
#include "core/checked.h"
#include "kernels/attention.h"
#include "kernels/bias_gradient.h"
#include "kernels/embedding.h"
#include "kernels/rmsnorm.h"
#include "kernels/silu.h"
#include "model/flat.h"
#include "model/transformer.h"

namespace minillm::model {
namespace {

/// What both halves of a block's backward pass do with its buffers.
struct Backward {
  int64_t rows, dim;
  DType dtype;
  const shard::Operands& o;
  cuda::BlasLt& blas;
  cudaStream_t stream;
  float* scratch;

  /// d_weight[out, in] = d_outᵀ · in, in fp32, straight into the gradient buffer.
  void weight_gradient(int64_t offset, const void* d_out, int64_t out_columns, const void* in,
                       int64_t in_columns) const {
    blas.run({.m = out_columns,
              .n = in_columns,
              .k = rows,
              .a = d_out,
              .transpose_a = true,
              .b = in,
              .d = o.gradients + offset,
              .input = dtype,
              .output = DType::kFp32},
             stream);
  }
  /// d_in = d_out · weight.
  void input_gradient(void* d_in, int64_t in_columns, const void* d_out, int64_t out_columns,
                      int64_t offset) const {
    blas.run({.m = rows,
              .n = in_columns,
              .k = out_columns,
              .a = d_out,
              .b = weight(o, offset, dtype),
              .d = d_in,
              .input = dtype,
              .output = dtype},
             stream);
  }
  void bias(int64_t offset, const void* d_out, int64_t columns) const {
    kernels::bias_gradient({.dbias = o.gradients + offset,
                            .dy = d_out,
                            .scratch = scratch,
                            .rows = rows,
                            .columns = narrow<int>(columns),
                            .dtype = dtype},
                           stream);
  }
  void norm_again(void* normed, const void* x, const float* rstd, int64_t offset) const {
    kernels::rmsnorm_recompute({.y = normed,
                                .rstd = rstd,
                                .x = x,
                                .weight = weight(o, offset, dtype),
                                .rows = rows,
                                .columns = narrow<int>(dim),
                                .dtype = dtype},
                               stream);
  }
  /// d_residual += gradient through the norm of x.
  void norm(void* d_residual, const void* d_normed, const void* x, const float* rstd, int64_t offset) const {
    kernels::rmsnorm_backward({.dx = d_residual,
                               .dweight = o.gradients + offset,
                               .dy = d_normed,
                               .x = x,
                               .weight = weight(o, offset, dtype),
                               .rstd = rstd,
                               .residual = d_residual,
                               .scratch = scratch,
                               .rows = rows,
                               .columns = narrow<int>(dim),
                               .dtype = dtype},
                              stream);
  }
};

}  // namespace

void Transformer::backward(int unit, const shard::Operands& o, cuda::BlasLt& blas,
                           cudaStream_t stream) const {
  if (unit == 0) return backward_embedding(o, stream);
  backward_ffn(unit, o, blas, stream);
  backward_attention(unit, o, blas, stream);
}

void Transformer::backward_ffn(int unit, const shard::Operands& o, cuda::BlasLt& blas,
                               cudaStream_t stream) const {
  const BlockBuffers& b = blocks_[unit];
  const int64_t dim = model_.dim, ffn = model_.ffn_dim;
  const Backward pass{rows_, dim, dtype_, o, blas, stream, buffer<float>(o, b.backward_scratch)};
  const void* pre_activation = buffer(o, b.ffn);
  const void* middle = buffer(o, b.middle);
  const float* rstd = buffer<float>(o, b.rstd2);
  void* d = buffer(o, d_residual_);
  void* wide = buffer(o, b.backward_wide);
  void* normed = buffer(o, b.backward_normed);
  void* d_normed = buffer(o, b.backward_d_normed);

  kernels::silu_forward({.y = wide, .u = pre_activation, .count = rows_ * ffn, .dtype = dtype_}, stream);
  pass.weight_gradient(block_.down, d, dim, wide, ffn);
  pass.input_gradient(wide, ffn, d, dim, block_.down);
  kernels::silu_backward({.du = wide, .dy = wide, .u = pre_activation, .count = rows_ * ffn, .dtype = dtype_},
                         stream);
  pass.norm_again(normed, middle, rstd, block_.norm2);
  pass.weight_gradient(block_.up, wide, ffn, normed, dim);
  pass.input_gradient(d_normed, dim, wide, ffn, block_.up);
  pass.norm(d, d_normed, middle, rstd, block_.norm2);
}

void Transformer::backward_attention(int unit, const shard::Operands& o, cuda::BlasLt& blas,
                                     cudaStream_t stream) const {
  const BlockBuffers& b = blocks_[unit];
  const int64_t dim = model_.dim;
  const Backward pass{rows_, dim, dtype_, o, blas, stream, buffer<float>(o, b.backward_scratch)};
  const void* x = buffer(o, input_[unit]);
  const void* attention = buffer(o, b.attention);
  const float* rstd = buffer<float>(o, b.rstd1);
  void* d = buffer(o, d_residual_);
  void* d_qkv = buffer(o, b.backward_wide);
  void* normed = buffer(o, b.backward_normed);
  void* d_normed = buffer(o, b.backward_d_normed);
  void* d_attention = d_normed;  // the one is dead before the other is born

  pass.weight_gradient(block_.out_weight, d, dim, attention, dim);
  pass.bias(block_.out_bias, d, dim);
  pass.input_gradient(d_attention, dim, d, dim, block_.out_weight);
  kernels::attention_backward({.shape = attention_shape(),
                               .dqkv = d_qkv,
                               .dout = d_attention,
                               .qkv = buffer(o, b.qkv),
                               .out = attention,
                               .lse = buffer<float>(o, b.lse),
                               .scratch = pass.scratch},
                              stream);
  rotate(d_qkv, /*inverse=*/true, o, stream);
  pass.bias(block_.in_bias, d_qkv, 3 * dim);
  pass.norm_again(normed, x, rstd, block_.norm1);
  pass.weight_gradient(block_.in_weight, d_qkv, 3 * dim, normed, dim);
  pass.input_gradient(d_normed, dim, d_qkv, 3 * dim, block_.in_weight);
  pass.norm(d, d_normed, x, rstd, block_.norm1);
}

void Transformer::backward_embedding(const shard::Operands& o, cudaStream_t stream) const {
  kernels::embedding_backward({.dtable = o.gradients,
                               .dout = buffer(o, d_residual_),
                               .tokens = buffer<int32_t>(o, tokens_),
                               .scratch = buffer(o, embedding_scratch_),
                               .count = rows_,
                               .vocabulary = model_.vocab_size,
                               .columns = narrow<int>(model_.dim),
                               .dtype = dtype_},
                              stream);
}

}  // namespace minillm::model
