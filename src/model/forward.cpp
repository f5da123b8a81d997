#include "core/checked.h"
#include "kernels/attention.h"
#include "kernels/embedding.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/silu.h"
#include "model/flat.h"
#include "model/transformer.h"

namespace minillm::model {

using shard::OpKind;

void Transformer::compute(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
                          cudaStream_t stream) const {
  check(operation);
  switch (operation.kind) {
    case OpKind::kForward:
    case OpKind::kRecompute:
      return forward(operation, o, blas, stream);
    case OpKind::kHeadLoss:
      return head_loss(operation, o, blas, stream);
    default:
      return operation.unit == head_unit() ? head_backward_input(operation, o, blas, stream)
                                           : backward(operation, o, blas, stream);
  }
}

int32_t* Transformer::ids(int which, const shard::Operation& operation, const shard::Operands& o) const {
  return buffer<int32_t>(o, which) + operation.micro_batch * rows_;
}

void Transformer::rotate(void* qkv, bool inverse, const shard::Operands& o, cudaStream_t stream) const {
  if (rope_table_ < 0) return;
  kernels::rope({.qkv = qkv,
                 .table = buffer<float2>(o, rope_table_),
                 .batch = shape_.batch,
                 .sequence = narrow<int>(shape_.sequence),
                 .heads = narrow<int>(model_.n_heads),
                 .head_size = narrow<int>(model_.head_size()),
                 .inverse = inverse,
                 .dtype = dtype_},
                stream);
}

/// The forward pass of a block.
struct Transformer::ForwardPass {
  const Transformer& t;
  const shard::Operands& o;
  cuda::BlasLt& blas;
  cudaStream_t stream;

  const void* w(int64_t offset) const { return weight(o, offset, t.dtype_); }

  void norm(void* normed, int rstd, const void* x, int64_t weight_offset) const {
    kernels::rmsnorm_forward({.y = normed,
                              .rstd = buffer<float>(o, rstd),
                              .x = x,
                              .weight = w(weight_offset),
                              .rows = t.rows_,
                              .columns = narrow<int>(t.model_.dim),
                              .epsilon = static_cast<float>(t.model_.norm_eps),
                              .dtype = t.dtype_},
                             stream);
  }

  /// out = in · weightᵀ (+ bias) (+ residual)
  void linear(void* out, int64_t columns, const void* in, int64_t in_columns, int64_t weight_offset,
              const void* bias, const void* residual) const {
    blas.run({.m = t.rows_,
              .n = columns,
              .k = in_columns,
              .a = in,
              .b = w(weight_offset),
              .transpose_b = true,
              .d = out,
              .c = residual,
              .beta = residual ? 1.0f : 0.0f,
              .bias = bias,
              .input = t.dtype_,
              .output = t.dtype_},
             stream);
  }

  void to_pre_activation(int unit, const Activations& a, int scratch) const {
    const int64_t dim = t.model_.dim, ffn = t.model_.ffn_dim;
    const BlockOffsets& at = t.block_;
    const void* x = buffer(o, t.input_[unit]);
    void* normed1 = buffer(o, or_scratch(a.normed1, scratch));
    void* qkv = buffer(o, a.qkv);
    void* attention = buffer(o, a.attention);
    void* middle = buffer(o, a.middle);
    void* normed2 = buffer(o, or_scratch(a.normed2, scratch));

    norm(normed1, a.rstd1, x, at.norm1);
    linear(qkv, 3 * dim, normed1, dim, at.in_weight, w(at.in_bias), nullptr);
    t.rotate(qkv, /*inverse=*/false, o, stream);
    kernels::attention_forward(
        {.shape = t.attention_shape(), .out = attention, .lse = buffer<float>(o, a.lse), .qkv = qkv}, stream);
    linear(middle, dim, attention, dim, at.out_weight, w(at.out_bias), x);

    norm(normed2, a.rstd2, middle, at.norm2);
    linear(buffer(o, a.pre_activation), ffn, normed2, dim, at.up, nullptr, nullptr);
  }

  void to_output(int unit, const Activations& a) const {
    const int64_t dim = t.model_.dim, ffn = t.model_.ffn_dim;
    void* activation = buffer(o, or_scratch(a.activation, t.wide_));
    kernels::silu_forward(
        {.y = activation, .u = buffer(o, a.pre_activation), .count = t.rows_ * ffn, .dtype = t.dtype_},
        stream);
    linear(buffer(o, t.input_[unit + 1]), dim, activation, ffn, t.block_.down, nullptr, buffer(o, a.middle));
  }
};

void Transformer::forward(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
                          cudaStream_t stream) const {
  const int unit = operation.unit;
  if (unit == 0)
    return kernels::embedding_forward({.out = buffer(o, input_[1]),
                                       .table = o.weights,
                                       .tokens = ids(tokens_, operation, o),
                                       .count = rows_,
                                       .columns = narrow<int>(model_.dim),
                                       .dtype = dtype_},
                                      stream);
  const BlockBuffers& b = blocks_[unit];
  const ForwardPass pass{*this, o, blas, stream};
  if (operation.kind == OpKind::kRecompute) return pass.to_pre_activation(unit, b.saved, narrow_);
  pass.to_pre_activation(unit, b.forward, d_residual_);
  pass.to_output(unit, b.forward);
}

}  // namespace minillm::model
