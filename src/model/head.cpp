// The last unit: final norm, projection to the vocabulary and the loss, forward and backward at once, chunk
// by chunk; or with the gradient of its input apart, so that the weight's is on its way meanwhile.
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

/// The parts of the head's pass. Rows are those of a chunk, whose logits, and then their gradient, the wide
/// scratch holds.
struct Transformer::HeadPass {
  const Transformer& t;
  const shard::Operation& operation;
  const shard::Operands& o;
  cuda::BlasLt& blas;
  cudaStream_t stream;

  struct Rows {
    int64_t first, count;
  };

  int64_t dim() const { return t.model_.dim; }
  int64_t columns() const { return padded_vocabulary(t.model_); }
  void* logits() const { return buffer(o, t.wide_); }
  void* row(void* matrix, int64_t first) const { return row_of(matrix, first, dim(), t.dtype_); }

  /// The loss of each row, and the gradient of the logits.
  void loss(Rows rows, void* in) const {
    t.project(row(in, rows.first), rows.count, o, blas, stream);
    kernels::cross_entropy({.logits = logits(),
                            .loss = buffer<float>(o, t.losses_) + rows.first,
                            .targets = t.ids(t.targets_, operation, o) + rows.first,
                            .scale = buffer<float>(o, t.loss_scale_),
                            .rows = rows.count,
                            .vocabulary = narrow<int>(t.model_.vocab_size),
                            .columns = narrow<int>(columns()),
                            .dtype = t.dtype_},
                           stream);
  }
  void weight_gradient(Rows rows, void* in) const {
    float* d_table = o.gradients + t.head_weight_;
    blas.run({.m = columns(),
              .n = dim(),
              .k = rows.count,
              .a = logits(),
              .transpose_a = true,
              .b = row(in, rows.first),
              .d = d_table,
              .c = d_table,
              .beta = rows.first == 0 && !operation.accumulate ? 0.0f : 1.0f,
              .input = t.dtype_,
              .output = DType::kFp32},
             stream);
  }
  void input_gradient(Rows rows) const {
    blas.run({.m = rows.count,
              .n = dim(),
              .k = columns(),
              .a = logits(),
              .b = weight(o, t.head_weight_, t.dtype_),
              .d = row(buffer(o, t.d_residual_), rows.first),
              .input = t.dtype_,
              .output = t.dtype_},
             stream);
  }
  /// From the gradient of what is projected to that of the head's input, in place.
  void through_norm() const {
    if (!t.model_.final_norm) return;
    void* d = buffer(o, t.d_residual_);
    kernels::rmsnorm_backward({.dx = d,
                               .dweight = o.gradients + t.head_norm_,
                               .dy = d,
                               .x = buffer(o, t.input_[t.head_unit()]),
                               .weight = weight(o, t.head_norm_, t.dtype_),
                               .rstd = buffer<float>(o, t.final_rstd_),
                               .residual = nullptr,
                               .scratch = buffer<float>(o, t.kernel_scratch_),
                               .rows = t.rows_,
                               .columns = narrow<int>(dim()),
                               .dtype = t.dtype_,
                               .accumulate = operation.accumulate},
                              stream);
  }
};

void Transformer::head_loss(const shard::Operation& operation, const shard::Operands& o, cuda::BlasLt& blas,
                            cudaStream_t stream) const {
  const HeadPass pass{*this, operation, o, blas, stream};
  const bool whole = operation.segment < 0;
  void* in = head_input(buffer(o, input_[head_unit()]), rows_, o, stream);
  kernels::reciprocal_of_count(buffer<float>(o, loss_scale_), o.valid_count, stream);
  for (int64_t first = 0; first < rows_; first += chunk_rows()) {
    const HeadPass::Rows rows{first, std::min(chunk_rows(), rows_ - first)};
    pass.loss(rows, in);
    pass.weight_gradient(rows, in);
    if (whole) pass.input_gradient(rows);
  }
  kernels::sum({.out = o.loss_sum,
                .in = buffer<float>(o, losses_),
                .scratch = buffer<float>(o, kernel_scratch_),
                .count = rows_,
                .square = false},
               stream);
  if (whole) pass.through_norm();
}

void Transformer::head_backward_input(const shard::Operation& operation, const shard::Operands& o,
                                      cuda::BlasLt& blas, cudaStream_t stream) const {
  const HeadPass pass{*this, operation, o, blas, stream};
  pass.input_gradient({0, rows_});
  pass.through_norm();
}

void Transformer::logits_of(int64_t row, const shard::Operands& o, cuda::BlasLt& blas,
                            cudaStream_t stream) const {
  void* x = row_of(buffer(o, input_[head_unit()]), row, model_.dim, dtype_);
  project(head_input(x, 1, o, stream), 1, o, blas, stream);
}

}  // namespace minillm::model
