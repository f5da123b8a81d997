// The last unit: final norm, projection to the vocabulary and the loss, forward and backward at once, chunk
// by chunk.
#include <algorithm>

#include "core/checked.h"
#include "kernels/cross_entropy.h"
#include "kernels/reduction.h"
#include "kernels/rmsnorm.h"
#include "model/flat.h"
#include "model/parameters.h"
#include "model/transformer.h"

namespace minillm::model {

void* Transformer::head_input(void* x, int64_t rows, const shard::Operands& o, cudaStream_t stream) const {
  if (!model_.final_norm) return x;
  void* normed = buffer(o, narrow_);
  kernels::rmsnorm_forward({.y = normed,
                            .rstd = buffer<float>(o, final_rstd_),
                            .x = x,
                            .weight = weight(o, head_norm_, dtype_),
                            .rows = rows,
                            .columns = narrow<int>(model_.dim),
                            .epsilon = static_cast<float>(model_.norm_eps),
                            .dtype = dtype_},
                           stream);
  return normed;
}

void Transformer::project(const void* in, int64_t rows, const shard::Operands& o, cuda::BlasLt& blas,
                          cudaStream_t stream) const {
  blas.run({.m = rows,
            .n = padded_vocabulary(model_),
            .k = model_.dim,
            .a = in,
            .b = weight(o, head_weight_, dtype_),
            .transpose_b = true,
            .d = buffer(o, wide_),
            .input = dtype_,
            .output = dtype_},
           stream);
}

void Transformer::head_loss(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
                            cudaStream_t stream) const {
  const int64_t dim = model_.dim, columns = padded_vocabulary(model_);
  const void* table = weight(o, head_weight_, dtype_);
  void* x = buffer(o, input_[head_unit()]);
  void* normed = head_input(x, rows_, o, stream);
  void* d = buffer(o, d_residual_);
  void* logits = buffer(o, wide_);
  float* losses = buffer<float>(o, losses_);
  float* scale = buffer<float>(o, loss_scale_);

  kernels::reciprocal_of_count(scale, o.valid_count, stream);
  for (int64_t first = 0; first < rows_; first += chunk_rows()) {
    const int64_t rows = std::min(chunk_rows(), rows_ - first);
    const void* in = row_of(normed, first, dim, dtype_);
    project(in, rows, o, blas, stream);
    kernels::cross_entropy({.logits = logits,
                            .loss = losses + first,
                            .targets = ids(targets_, operation, o) + first,
                            .scale = scale,
                            .rows = rows,
                            .vocabulary = narrow<int>(model_.vocab_size),
                            .columns = narrow<int>(columns),
                            .dtype = dtype_},
                           stream);
    blas.run({.m = rows,
              .n = dim,
              .k = columns,
              .a = logits,
              .b = table,
              .d = row_of(d, first, dim, dtype_),
              .input = dtype_,
              .output = dtype_},
             stream);
    float* d_table = o.gradients + head_weight_;
    blas.run({.m = columns,
              .n = dim,
              .k = rows,
              .a = logits,
              .transpose_a = true,
              .b = in,
              .d = d_table,
              .c = d_table,
              .beta = first == 0 && !operation.accumulate ? 0.0f : 1.0f,
              .input = dtype_,
              .output = DType::kFp32},
             stream);
  }
  float* scratch = buffer<float>(o, kernel_scratch_);
  kernels::sum({.out = o.loss_sum, .in = losses, .scratch = scratch, .count = rows_, .square = false},
               stream);
  if (model_.final_norm)
    kernels::rmsnorm_backward({.dx = d,
                               .dweight = o.gradients + head_norm_,
                               .dy = d,
                               .x = x,
                               .weight = weight(o, head_norm_, dtype_),
                               .rstd = buffer<float>(o, final_rstd_),
                               .residual = nullptr,
                               .scratch = scratch,
                               .rows = rows_,
                               .columns = narrow<int>(dim),
                               .dtype = dtype_,
                               .accumulate = operation.accumulate},
                              stream);
}

void Transformer::logits_of(int64_t row, const shard::Operands& o, cuda::BlasLt& blas,
                            cudaStream_t stream) const {
  void* x = row_of(buffer(o, input_[head_unit()]), row, model_.dim, dtype_);
  project(head_input(x, 1, o, stream), 1, o, blas, stream);
}

}  // namespace minillm::model
