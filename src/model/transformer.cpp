// Buffers; which operation uses which is in uses.cpp, the passes in forward.cpp, head.cpp and backward.cpp.
#include "model/transformer.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"
#include "kernels/bias_gradient.h"
#include "kernels/embedding.h"
#include "kernels/reduction.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "model/parameters.h"

namespace minillm::model {

using shard::OpKind;
using shard::Purpose;

Transformer::Transformer(const config::Model& model, const BatchShape& shape, DType dtype,
                         const shard::Layout& layout, const Recomputation& recomputation)
    : model_(model), shape_(shape), dtype_(dtype), layout_(layout), rows_(shape.batch * shape.sequence) {
  if (!recomputation.blocks.empty() && std::ssize(recomputation.blocks) != model_.n_layers)
    throw InternalError("Transformer: what to recompute is given for " +
                        std::to_string(recomputation.blocks.size()) + " blocks, but the model has " +
                        std::to_string(model_.n_layers));
  add_inputs();
  add_scratch();
  input_.assign(static_cast<size_t>(unit_count()), -1);
  blocks_.resize(static_cast<size_t>(head_unit()));
  for (int unit = 1; unit <= head_unit(); ++unit) {
    input_[unit] = add_rows(layout_.units[unit].name + " input", model_.dim, Purpose::kActivations);
    if (unit < head_unit()) add_block(unit, recomputation);
  }
  d_residual_ = add_rows("residual gradient", model_.dim, Purpose::kActivations);

  if (model_.n_layers > 0)
    block_ = {offset(1, "norm1.weight"),    offset(1, "in_proj_weight"), offset(1, "in_proj_bias"),
              offset(1, "out_proj.weight"), offset(1, "out_proj.bias"),  offset(1, "norm2.weight"),
              offset(1, "ffn.up.weight"),   offset(1, "ffn.down.weight")};
  head_weight_ = offset(head_unit(), "head.weight");
  if (model_.final_norm) head_norm_ = offset(head_unit(), "final_norm.weight");
}

int Transformer::add(std::string name, int64_t bytes, Purpose purpose) {
  buffers_.push_back({std::move(name), bytes, purpose});
  return static_cast<int>(buffers_.size()) - 1;
}

int Transformer::add_rows(std::string name, int64_t columns, Purpose purpose) {
  return add(std::move(name), rows_ * columns * size_of(dtype_), purpose);
}

void Transformer::add_inputs() {
  constexpr int64_t kId = sizeof(int32_t), kPair = sizeof(float2);
  tokens_ = add("tokens", shape_.micro_batches * rows_ * kId, Purpose::kInputs);
  targets_ = add("targets", shape_.micro_batches * rows_ * kId, Purpose::kInputs);
  if (model_.rope_theta > 0)
    rope_table_ = add("rope table", shape_.sequence * model_.head_size() / 2 * kPair, Purpose::kInputs);
}

void Transformer::add_scratch() {
  constexpr int64_t kStatistic = sizeof(float);
  const int dim = narrow<int>(model_.dim);
  const int64_t wide = rows_ * std::max(model_.ffn_dim, 3 * model_.dim);
  narrow_ = add_rows("narrow scratch", dim, Purpose::kScratch);
  wide_ = add("wide scratch", std::max(wide, chunk_rows() * padded_vocabulary(model_)) * size_of(dtype_),
              Purpose::kScratch);
  kernel_scratch_ =
      add("kernel scratch",
          std::max({kernels::rmsnorm_backward_scratch(rows_, dim), kernels::bias_gradient_scratch(rows_, dim),
                    kernels::bias_gradient_scratch(rows_, 3 * dim),
                    kernels::attention_backward_scratch(attention_shape()), kernels::sum_scratch(rows_),
                    kernels::embedding_backward_scratch(rows_, model_.vocab_size, dim)}),
          Purpose::kScratch);
  losses_ = add("losses", rows_ * kStatistic, Purpose::kScratch);
  loss_scale_ = add("loss scale", kStatistic, Purpose::kScratch);
  if (model_.final_norm) final_rstd_ = add("final rstd", rows_ * kStatistic, Purpose::kScratch);
}

Transformer::Activations Transformer::add_activations(const std::string& owner, bool norms_and_silu) {
  constexpr int64_t kStatistic = sizeof(float);
  const auto rows = [&](const char* what, int64_t columns) {
    return add_rows(owner + what, columns, Purpose::kActivations);
  };
  const auto statistics = [&](const char* what, int64_t columns) {
    return add(owner + what, rows_ * columns * kStatistic, Purpose::kActivations);
  };
  const int64_t dim = model_.dim, ffn = model_.ffn_dim;
  Activations a{.rstd1 = statistics(" rstd1", 1),
                .qkv = rows(" qkv", 3 * dim),
                .attention = rows(" attention", dim),
                .lse = statistics(" lse", model_.n_heads),
                .middle = rows(" middle", dim),
                .rstd2 = statistics(" rstd2", 1),
                .pre_activation = rows(" pre-activation", ffn)};
  if (norms_and_silu) {
    a.normed1 = rows(" normed1", dim);
    a.normed2 = rows(" normed2", dim);
    a.activation = rows(" activation", ffn);
  }
  return a;
}

void Transformer::add_block(int unit, const Recomputation& recomputation) {
  const std::string name = layout_.units[unit].name;
  const int block = unit - 1;
  BlockBuffers& b = blocks_[unit];
  b.recompute = recomputation.blocks.empty() ? Recompute::kCheap : recomputation.blocks[block];
  if (b.recompute == Recompute::kBlock) {
    if (!passing_) passing_ = add_activations("passing", false);
    b.splits = block < recomputation.deferred_blocks;
    b.forward = *passing_;
    b.saved = b.splits ? add_activations(name + " again", false) : *passing_;
  } else {
    b.forward = b.saved = add_activations(name, b.recompute == Recompute::kNone);
  }
  b.d_output = add_rows(name + " output gradient", model_.dim, Purpose::kActivations);
  b.d_middle = add_rows(name + " middle gradient", model_.dim, Purpose::kActivations);
  b.d_pre_activation = add_rows(name + " pre-activation gradient", model_.ffn_dim, Purpose::kActivations);
  b.d_qkv = add_rows(name + " qkv gradient", 3 * model_.dim, Purpose::kActivations);
}

int64_t Transformer::offset(int unit, const std::string& suffix) const {
  for (const shard::Slice& slice : layout_.units[unit].slices)
    if (slice.name.ends_with(suffix)) return slice.offset;
  throw InternalError("unit " + layout_.units[unit].name + " has no tensor " + suffix);
}

bool Transformer::knows(const shard::Operation& operation) const {
  const int unit = operation.unit;
  const bool block = unit > 0 && unit < head_unit();
  switch (operation.kind) {
    case OpKind::kForward:
    case OpKind::kBackward:
      return unit == 0 || block;
    case OpKind::kHeadLoss:
      return unit == head_unit() &&
             (operation.segment < 0 || (splits_head() && operation.segment == projection_segment()));
    case OpKind::kRecompute:
      return block && blocks_[unit].recompute == Recompute::kBlock;
    case OpKind::kBackwardInput:
      if (unit == head_unit())
        return splits_head() && operation.segment == (model_.final_norm ? kFinalNorm : -1);
      return block && blocks_[unit].splits;
    case OpKind::kBackwardWeight:
      return block && blocks_[unit].splits && operation.segment >= -1 && operation.segment <= kFeedForward;
    default:
      return false;
  }
}

void Transformer::check(const shard::Operation& operation) const {
  if (knows(operation) && operation.micro_batch >= 0 && operation.micro_batch < shape_.micro_batches) return;
  throw InternalError(
      "Transformer: '" + describe(operation, layout_.unit_names()) + "' is no operation of this model of " +
      std::to_string(model_.n_layers) + " blocks and " + std::to_string(shape_.micro_batches) +
      " micro-batches. Only blocks that are recomputed whole have kRecompute, and of those only the deferred "
      "have kBackwardInput and kBackwardWeight. A head whose rows are several chunks is not split.");
}

int64_t Transformer::chunk_rows() const {
  return std::min(shape_.head_chunk, rows_);
}

kernels::AttentionShape Transformer::attention_shape() const {
  const int head_size = narrow<int>(model_.head_size());
  return {.batch = shape_.batch,
          .sequence = narrow<int>(shape_.sequence),
          .heads = narrow<int>(model_.n_heads),
          .head_size = head_size,
          .causal = model_.causal,
          .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_size))),
          .dtype = dtype_};
}

std::vector<float2> Transformer::rope_table_values() const {
  return kernels::rope_table(narrow<int>(shape_.sequence), narrow<int>(model_.head_size()),
                             model_.rope_theta);
}

}  // namespace minillm::model
