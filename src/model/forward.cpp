#include "core/checked.h"
#include "kernels/attention.h"
#include "kernels/embedding.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/silu.h"
#include "model/flat.h"
#include "model/transformer.h"

namespace minillm::model {

void Transformer::forward(int unit, const shard::Operands& o, cuda::BlasLt& blas, cudaStream_t stream) const {
  if (unit > 0) return forward_block(unit, o, blas, stream);
  kernels::embedding_forward({.out = buffer(o, input_[1]),
                              .table = o.weights,
                              .tokens = buffer<int32_t>(o, tokens_),
                              .count = rows_,
                              .columns = narrow<int>(model_.dim),
                              .dtype = dtype_},
                             stream);
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

void Transformer::forward_block(int unit, const shard::Operands& o, cuda::BlasLt& blas,
                                cudaStream_t stream) const {
  const BlockBuffers& b = blocks_[unit];
  const int64_t dim = model_.dim, ffn = model_.ffn_dim;
  const auto w = [&](int64_t offset) { return weight(o, offset, dtype_); };
  const void* x = buffer(o, input_[unit]);
  void* qkv = buffer(o, b.qkv);
  void* attention = buffer(o, b.attention);
  void* middle = buffer(o, b.middle);
  void* pre_activation = buffer(o, b.ffn);
  void* normed = buffer(o, b.forward_normed);
  void* activation = buffer(o, b.forward_activation);
  const auto norm = [&](const void* in, int64_t weight_offset, int rstd) {
    kernels::rmsnorm_forward({.y = normed,
                              .rstd = buffer<float>(o, rstd),
                              .x = in,
                              .weight = w(weight_offset),
                              .rows = rows_,
                              .columns = narrow<int>(dim),
                              .epsilon = static_cast<float>(model_.norm_eps),
                              .dtype = dtype_},
                             stream);
  };
  // out = in · weightᵀ (+ bias) (+ residual)
  const auto linear = [&](void* out, int64_t columns, const void* in, int64_t in_columns,
                          int64_t weight_offset, const void* bias, const void* residual) {
    blas.run({.m = rows_,
              .n = columns,
              .k = in_columns,
              .a = in,
              .b = w(weight_offset),
              .transpose_b = true,
              .d = out,
              .c = residual,
              .beta = residual ? 1.0f : 0.0f,
              .bias = bias,
              .input = dtype_,
              .output = dtype_},
             stream);
  };

  norm(x, block_.norm1, b.rstd1);
  linear(qkv, 3 * dim, normed, dim, block_.in_weight, w(block_.in_bias), nullptr);
  rotate(qkv, /*inverse=*/false, o, stream);
  kernels::attention_forward(
      {.shape = attention_shape(), .out = attention, .lse = buffer<float>(o, b.lse), .qkv = qkv}, stream);
  linear(middle, dim, attention, dim, block_.out_weight, w(block_.out_bias), x);

  norm(middle, block_.norm2, b.rstd2);
  linear(pre_activation, ffn, normed, dim, block_.up, nullptr, nullptr);
  kernels::silu_forward({.y = activation, .u = pre_activation, .count = rows_ * ffn, .dtype = dtype_},
                        stream);
  linear(buffer(o, input_[unit + 1]), dim, activation, ffn, block_.down, nullptr, middle);
}

}  // namespace minillm::model
