// Which buffers each operation reads and writes: what the memory plan and the waits are made from.
#include <algorithm>
#include <initializer_list>

#include "model/parameters.h"
#include "model/transformer.h"

namespace minillm::model {

using shard::BufferUse;
using shard::OpKind;

namespace {

// Absent buffers (-1) are left out, scratch that is taken twice is named once.
void append(std::vector<int>& to, std::initializer_list<int> buffers) {
  for (int buffer : buffers)
    if (buffer >= 0 && std::ranges::find(to, buffer) == to.end()) to.push_back(buffer);
}

}  // namespace

BufferUse Transformer::uses(const shard::Operation& operation) const {
  if (operation.kind == OpKind::kUpload) return {{}, {tokens_, targets_}};
  if (operation.kind == OpKind::kBegin) return {{targets_}, {}};
  check(operation);
  const int unit = operation.unit;
  switch (operation.kind) {
    case OpKind::kForward:
      return unit == 0 ? BufferUse{{tokens_}, {input_[1]}} : forward_uses(unit);
    case OpKind::kHeadLoss:
      return head_loss_uses(/*whole=*/operation.segment < 0);
    case OpKind::kRecompute:
      return to_pre_activation_uses(unit, blocks_[unit].saved, narrow_);
    case OpKind::kBackwardInput:
      return unit == head_unit() ? head_backward_input_uses() : backward_input_uses(unit);
    case OpKind::kBackwardWeight:
      return backward_weight_uses(unit, operation.segment);
    default:
      return unit == 0 ? BufferUse{{tokens_, d_residual_}, {kernel_scratch_}} : backward_uses(unit);
  }
}

BufferUse Transformer::to_pre_activation_uses(int unit, const Activations& a, int scratch) const {
  BufferUse use;
  append(use.reads, {input_[unit], rope_table_});
  append(use.writes, {a.rstd1, or_scratch(a.normed1, scratch), a.qkv, a.attention, a.lse, a.middle, a.rstd2,
                      or_scratch(a.normed2, scratch), a.pre_activation});
  return use;
}

BufferUse Transformer::forward_uses(int unit) const {
  const Activations& a = blocks_[unit].forward;
  BufferUse use = to_pre_activation_uses(unit, a, d_residual_);
  append(use.writes, {or_scratch(a.activation, wide_), input_[unit + 1]});
  return use;
}

BufferUse Transformer::head_loss_uses(bool whole) const {
  BufferUse use = logits_uses();
  append(use.reads, {targets_});
  append(use.writes, {losses_, loss_scale_, kernel_scratch_});
  if (whole) append(use.writes, {d_residual_});
  return use;
}

BufferUse Transformer::head_backward_input_uses() const {
  BufferUse use{{wide_}, {d_residual_}};
  if (!model_.final_norm) return use;
  append(use.reads, {input_[head_unit()], final_rstd_});
  append(use.writes, {kernel_scratch_});
  return use;
}

BufferUse Transformer::logits_uses() const {
  BufferUse use{{input_[head_unit()]}, {wide_}};
  if (model_.final_norm) append(use.writes, {final_rstd_, narrow_});
  return use;
}

BufferUse Transformer::backward_uses(int unit) const {
  const Activations& a = blocks_[unit].saved;
  BufferUse use;
  append(use.reads, {input_[unit], rope_table_, d_residual_, a.rstd1, a.normed1, a.qkv, a.attention, a.lse,
                     a.middle, a.rstd2, a.normed2, a.pre_activation, a.activation});
  append(use.writes, {d_residual_, narrow_, wide_, kernel_scratch_});
  return use;
}

BufferUse Transformer::backward_input_uses(int unit) const {
  const BlockBuffers& b = blocks_[unit];
  const Activations& a = b.saved;
  BufferUse use;
  append(use.reads, {input_[unit], rope_table_, d_residual_, a.rstd1, a.qkv, a.attention, a.lse, a.middle,
                     a.rstd2, a.pre_activation});
  append(use.writes, {d_residual_, b.d_output, b.d_middle, b.d_pre_activation, b.d_qkv, kernel_scratch_});
  return use;
}

BufferUse Transformer::backward_weight_uses(int unit, int segment) const {
  const BlockBuffers& b = blocks_[unit];
  const Activations& a = b.saved;
  BufferUse use;
  const auto product_of = [&](int d_output, int input) { append(use.reads, {d_output, input}); };
  const auto product_of_norm = [&](int d_output, int normed, int x, int rstd) {
    product_of(d_output, normed);
    if (normed >= 0) return;
    append(use.reads, {x, rstd});
    append(use.writes, {narrow_});
  };
  if (segment < 0 || segment == kAttentionInput) {
    product_of_norm(b.d_qkv, a.normed1, input_[unit], a.rstd1);
    append(use.writes, {kernel_scratch_});
  }
  if (segment < 0 || segment == kAttentionOutput) {
    product_of(b.d_middle, a.attention);
    append(use.writes, {kernel_scratch_});
  }
  if (segment < 0 || segment == kFeedForward) {
    product_of(b.d_output, a.activation < 0 ? a.pre_activation : a.activation);
    if (a.activation < 0) append(use.writes, {wide_});
    product_of_norm(b.d_pre_activation, a.normed2, a.middle, a.rstd2);
  }
  return use;
}

}  // namespace minillm::model
