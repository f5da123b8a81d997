// What each operation launches, for hardware models: call for call what forward.cpp, head.cpp and
// backward.cpp do.
#include <algorithm>
#include <utility>

#include "core/checked.h"
#include "kernels/attention.h"
#include "kernels/bias_gradient.h"
#include "kernels/cast.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/reduction.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/silu.h"
#include "model/parameters.h"
#include "model/transformer.h"

namespace minillm::model {

using shard::KernelWork;
using shard::OpKind;

class Transformer::WorkList {
 public:
  WorkList(const Transformer& t, bool accumulate)
      : t_(t),
        rows_(t.rows_),
        dim_(t.model_.dim),
        ffn_(t.model_.ffn_dim),
        vocabulary_(padded_vocabulary(t.model_)),
        columns_(narrow<int>(t.model_.dim)),
        dtype_(t.dtype_),
        accumulate_(accumulate) {}

  std::vector<KernelWork> take() && { return std::move(list_); }

  void embedding_forward() { other(kernels::embedding_forward_cost(rows_, columns_, dtype_)); }
  void embedding_backward() {
    other(kernels::embedding_backward_cost(rows_, t_.model_.vocab_size, columns_, dtype_, accumulate_));
  }

  void forward() {
    to_pre_activation();
    silu();
    linear(dim_, ffn_, /*bias=*/false, /*residual=*/true);
  }
  void to_pre_activation() {
    norm();
    linear(3 * dim_, dim_, /*bias=*/true, /*residual=*/false);
    rotation();
    attention(kernels::attention_forward_cost(t_.attention_shape()));
    linear(dim_, dim_, /*bias=*/true, /*residual=*/true);
    norm();
    linear(ffn_, dim_, /*bias=*/false, /*residual=*/false);
  }

  void head_loss(bool whole) {
    if (t_.model_.final_norm) norm();
    other({.bytes = 2 * int64_t{sizeof(float)}, .flops = 1});  // reciprocal_of_count
    for (int64_t first = 0; first < rows_; first += t_.chunk_rows()) {
      const int64_t rows = std::min(t_.chunk_rows(), rows_ - first);
      product({.m = rows, .n = vocabulary_, .k = dim_, .output = dtype_});
      other(kernels::cross_entropy_cost(rows, narrow<int>(t_.model_.vocab_size), dtype_,
                                        narrow<int>(vocabulary_)));
      product({.m = vocabulary_,
               .n = dim_,
               .k = rows,
               .beta = first > 0 || accumulate_ ? 1.0f : 0.0f,
               .output = DType::kFp32});
      if (whole) head_input_gradient(rows);
    }
    other(kernels::sum_cost(rows_));
    if (whole && t_.model_.final_norm) norm_backward(/*residual=*/false);
  }
  void head_backward_input() {
    head_input_gradient(rows_);
    if (t_.model_.final_norm) norm_backward(/*residual=*/false);
  }

  void backward(const Activations& saved) {
    down_weight(saved);
    back_to_pre_activation();
    up_weight(saved);
    back_to_middle();
    attention_output_weights();
    back_to_qkv();
    attention_input_weights(saved);
    back_to_input();
  }
  void backward_input() {
    other(kernels::cast_cost({.count = rows_ * dim_, .out_type = dtype_, .in_type = dtype_}));
    back_to_pre_activation();
    back_to_middle();
    back_to_qkv();
    back_to_input();
  }
  void backward_weight(const Activations& saved, int segment) {
    const auto wanted = [&](BlockSegment s) { return segment < 0 || segment == s; };
    if (wanted(kFeedForward)) {
      down_weight(saved);
      up_weight(saved);
    }
    if (wanted(kAttentionOutput)) attention_output_weights();
    if (wanted(kAttentionInput)) attention_input_weights(saved);
  }

 private:
  void down_weight(const Activations& saved) {
    if (saved.activation < 0) silu();
    weight_gradient(dim_, ffn_);
  }
  void up_weight(const Activations& saved) {
    if (saved.normed2 < 0) norm_again();
    weight_gradient(ffn_, dim_);
  }
  void attention_output_weights() {
    weight_gradient(dim_, dim_);
    bias(dim_);
  }
  void attention_input_weights(const Activations& saved) {
    bias(3 * dim_);
    if (saved.normed1 < 0) norm_again();
    weight_gradient(3 * dim_, dim_);
  }
  void back_to_pre_activation() {
    input_gradient(ffn_, dim_);
    other(kernels::silu_backward_cost(rows_ * ffn_, dtype_));
  }
  void back_to_middle() {
    input_gradient(dim_, ffn_);
    norm_backward(/*residual=*/true);
  }
  void back_to_qkv() {
    input_gradient(dim_, dim_);
    attention(kernels::attention_backward_cost(t_.attention_shape()));
    rotation();
  }
  void back_to_input() {
    input_gradient(dim_, 3 * dim_);
    norm_backward(/*residual=*/true);
  }

  void add(KernelWork::Unit unit, const Cost& cost) { list_.push_back({unit, cost}); }
  void other(const Cost& cost) { add(KernelWork::Unit::kOther, cost); }
  void attention(const Cost& cost) { add(KernelWork::Unit::kAttention, cost); }
  void product(cuda::Gemm gemm) {
    gemm.input = dtype_;
    add(KernelWork::Unit::kProduct, cuda::gemm_cost(gemm));
  }

  void linear(int64_t columns, int64_t in_columns, bool bias, bool residual) {
    static constexpr std::byte kSome{};  // the cost asks whether there is a bias, not where
    product({.m = rows_,
             .n = columns,
             .k = in_columns,
             .beta = residual ? 1.0f : 0.0f,
             .bias = bias ? &kSome : nullptr,
             .output = dtype_});
  }
  void weight_gradient(int64_t columns, int64_t in_columns) {
    product({.m = columns,
             .n = in_columns,
             .k = rows_,
             .beta = accumulate_ ? 1.0f : 0.0f,
             .output = DType::kFp32});
  }
  void input_gradient(int64_t in_columns, int64_t columns) {
    product({.m = rows_, .n = in_columns, .k = columns, .output = dtype_});
  }
  void head_input_gradient(int64_t rows) {
    product({.m = rows, .n = dim_, .k = vocabulary_, .output = dtype_});
  }
  void norm() { other(kernels::rmsnorm_forward_cost(rows_, columns_, dtype_)); }
  void norm_again() { other(kernels::rmsnorm_recompute_cost(rows_, columns_, dtype_)); }
  void norm_backward(bool residual) {
    other(kernels::rmsnorm_backward_cost(rows_, columns_, residual, dtype_, accumulate_));
  }
  void silu() { other(kernels::silu_forward_cost(rows_ * ffn_, dtype_)); }
  void bias(int64_t columns) {
    other(kernels::bias_gradient_cost(rows_, narrow<int>(columns), dtype_, accumulate_));
  }
  void rotation() {
    if (t_.rope_table_ < 0) return;
    other(kernels::rope_cost(t_.shape_.batch, narrow<int>(t_.shape_.sequence), narrow<int>(t_.model_.n_heads),
                             narrow<int>(t_.model_.head_size()), dtype_));
  }

  const Transformer& t_;
  const int64_t rows_, dim_, ffn_, vocabulary_;
  const int columns_;
  const DType dtype_;
  const bool accumulate_;
  std::vector<KernelWork> list_;
};

std::vector<KernelWork> Transformer::work(const shard::Operation& operation) const {
  check(operation);
  const int unit = operation.unit;
  WorkList list(*this, operation.accumulate);
  switch (operation.kind) {
    case OpKind::kForward:
      unit == 0 ? list.embedding_forward() : list.forward();
      break;
    case OpKind::kHeadLoss:
      list.head_loss(/*whole=*/operation.segment < 0);
      break;
    case OpKind::kRecompute:
      list.to_pre_activation();
      break;
    case OpKind::kBackwardInput:
      unit == head_unit() ? list.head_backward_input() : list.backward_input();
      break;
    case OpKind::kBackwardWeight:
      list.backward_weight(blocks_[unit].saved, operation.segment);
      break;
    default:
      unit == 0 ? list.embedding_backward() : list.backward(blocks_[unit].saved);
  }
  return std::move(list).take();
}

}  // namespace minillm::model
