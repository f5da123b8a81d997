// Buffers and their uses; the passes are in forward.cpp, head.cpp and backward.cpp.
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

using shard::BufferUse;
using shard::OpKind;
using shard::Purpose;

Transformer::Transformer(const config::Model& model, const BatchShape& shape, DType dtype,
                         const shard::Layout& layout)
    : model_(model), shape_(shape), dtype_(dtype), layout_(layout), rows_(shape.batch * shape.sequence) {
  const int64_t residual_bytes = rows_ * model_.dim * size_of(dtype_);
  tokens_ = add("tokens", rows_ * 4, Purpose::kInputs);
  targets_ = add("targets", rows_ * 4, Purpose::kInputs);
  if (model_.rope_theta > 0)
    rope_table_ = add("rope table", shape_.sequence * model_.head_size() / 2 * 8, Purpose::kInputs);
  input_.assign(static_cast<size_t>(unit_count()), -1);
  blocks_.resize(static_cast<size_t>(head_unit()));
  for (int unit = 1; unit <= head_unit(); ++unit) {
    input_[unit] = add(layout_.units[unit].name + " input", residual_bytes, Purpose::kActivations);
    if (unit < head_unit()) add_block(unit);
  }
  add_head();
  d_residual_ = add("residual gradient", residual_bytes, Purpose::kActivations);
  embedding_scratch_ =
      add("embedding scratch",
          kernels::embedding_backward_scratch(rows_, model_.vocab_size, narrow<int>(model_.dim)),
          Purpose::kScratch);

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

void Transformer::add_block(int unit) {
  const std::string name = layout_.units[unit].name + " ";
  const int64_t element = size_of(dtype_), dim = model_.dim, ffn = model_.ffn_dim;
  const int64_t statistic = 4;  // fp32
  BlockBuffers& b = blocks_[unit];
  b.rstd1 = add(name + "rstd1", rows_ * statistic, Purpose::kActivations);
  b.qkv = add(name + "qkv", rows_ * 3 * dim * element, Purpose::kActivations);
  b.attention = add(name + "attention", rows_ * dim * element, Purpose::kActivations);
  b.lse = add(name + "lse", rows_ * model_.n_heads * statistic, Purpose::kActivations);
  b.middle = add(name + "middle", rows_ * dim * element, Purpose::kActivations);
  b.rstd2 = add(name + "rstd2", rows_ * statistic, Purpose::kActivations);
  b.ffn = add(name + "ffn", rows_ * ffn * element, Purpose::kActivations);
  // Scratch gets a name per operation, so that its memory is free to others in between.
  b.forward_normed = add(name + "forward normed", rows_ * dim * element, Purpose::kScratch);
  b.forward_activation = add(name + "forward activation", rows_ * ffn * element, Purpose::kScratch);
  // In turn SiLU output, gradient of the FFN pre-activation, gradient of QKV.
  b.backward_wide = add(name + "backward wide", rows_ * std::max(ffn, 3 * dim) * element, Purpose::kScratch);
  b.backward_normed = add(name + "backward normed", rows_ * dim * element, Purpose::kScratch);
  b.backward_d_normed = add(name + "backward d_normed", rows_ * dim * element, Purpose::kScratch);
  b.backward_scratch = add(name + "backward scratch", backward_scratch_bytes(), Purpose::kScratch);
}

void Transformer::add_head() {
  if (model_.final_norm) {
    head_.rstd = add("head rstd", rows_ * 4, Purpose::kScratch);
    head_.normed = add("head normed", rows_ * model_.dim * size_of(dtype_), Purpose::kScratch);
  }
  const int64_t chunk = std::min(shape_.head_chunk, rows_);
  head_.logits = add("logits", chunk * padded_vocabulary(model_) * size_of(dtype_), Purpose::kScratch);
  head_.losses = add("losses", rows_ * 4, Purpose::kScratch);
  head_.scale = add("loss scale", 4, Purpose::kScratch);
  head_.scratch = add("head scratch",
                      std::max(kernels::sum_scratch(rows_),
                               kernels::rmsnorm_backward_scratch(rows_, narrow<int>(model_.dim))),
                      Purpose::kScratch);
}

int64_t Transformer::backward_scratch_bytes() const {
  const int dim = narrow<int>(model_.dim);
  return std::max({kernels::rmsnorm_backward_scratch(rows_, dim),
                   kernels::bias_gradient_scratch(rows_, 3 * dim),
                   kernels::attention_backward_scratch(attention_shape())});
}

int64_t Transformer::offset(int unit, const std::string& suffix) const {
  for (const shard::Slice& slice : layout_.units[unit].slices)
    if (slice.name.ends_with(suffix)) return slice.offset;
  throw InternalError("unit " + layout_.units[unit].name + " has no tensor " + suffix);
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

BufferUse Transformer::uses(OpKind kind, int unit) const {
  BufferUse use;
  const auto with_rope = [&] {
    if (rope_table_ >= 0) use.reads.push_back(rope_table_);
  };
  if (kind == OpKind::kBegin) {
    use.writes = {tokens_, targets_};
  } else if (kind == OpKind::kForward && unit == 0) {
    use = {{tokens_}, {input_[1]}};
  } else if (kind == OpKind::kForward) {
    const BlockBuffers& b = blocks_[unit];
    use = {{input_[unit]},
           {b.rstd1, b.qkv, b.attention, b.lse, b.middle, b.rstd2, b.ffn, b.forward_normed,
            b.forward_activation, input_[unit + 1]}};
    with_rope();
  } else if (kind == OpKind::kHeadLoss) {
    use = logits_uses();
    use.reads.push_back(targets_);
    use.writes.insert(use.writes.end(), {head_.losses, head_.scale, head_.scratch, d_residual_});
  } else if (kind == OpKind::kBackward && unit == 0) {
    use = {{tokens_, d_residual_}, {embedding_scratch_}};
  } else if (kind == OpKind::kBackward) {
    const BlockBuffers& b = blocks_[unit];
    use = {{input_[unit], b.rstd1, b.qkv, b.attention, b.lse, b.middle, b.rstd2, b.ffn, d_residual_},
           {d_residual_, b.backward_wide, b.backward_normed, b.backward_d_normed, b.backward_scratch}};
    with_rope();
  }
  return use;
}

BufferUse Transformer::logits_uses() const {
  BufferUse use{{input_[head_unit()]}, {head_.logits}};
  if (model_.final_norm) use.writes.insert(use.writes.end(), {head_.rstd, head_.normed});
  return use;
}

}  // namespace minillm::model
