#include "model/eager_memory.h"

#include <algorithm>

#include "core/checked.h"

namespace minillm::model {
namespace {

constexpr int64_t kFloat = 4, kIndex = 8;  // bytes of fp32 statistics and of PyTorch's token ids
constexpr int64_t kSmallest = 512;         // PyTorch's allocator rounds each tensor up to a multiple of it
constexpr int64_t kScalar = kSmallest;

// Bytes of tensors of a block.
struct Tensors {
  Tensors(const config::Model& model, int64_t rows, DType type)
      : residual(of(rows * model.dim, size_of(type))),
        qkv(of(rows * 3 * model.dim, size_of(type))),
        wide(of(rows * model.ffn_dim, size_of(type))),
        rstd(of(rows, kFloat)),
        log_sum_exp(of(rows * model.n_heads, kFloat)),
        vector(of(model.dim, size_of(type))),
        ffn_weight(of(model.ffn_dim * model.dim, size_of(type))),
        attention_weights(of(3 * model.dim * model.dim, size_of(type)) + of(3 * model.dim, size_of(type)) +
                          of(model.dim * model.dim, size_of(type)) + vector) {}

  static int64_t of(int64_t elements, int64_t size) { return round_up(elements * size, kSmallest); }

  int64_t residual, qkv, wide, rstd, log_sum_exp;
  int64_t vector, ffn_weight, attention_weights;  // of norms, of one FFN product, of attention's with biases
};

// Both norms' outputs, QKV, the attention's output, the residual between, and the two sides of SiLU. Rotated
// Q and K are copies, and the attention's output takes their layout: the projection reads a copy of it. A
// flash kernel also keeps the two numbers that dropout would start from.
int64_t saved_by_block(const Tensors& t, bool rotary) {
  const int64_t rotated = rotary ? 3 * t.residual : 0;
  const int64_t attention = t.qkv + rotated + t.log_sum_exp + t.residual + 2 * kScalar;
  return attention + 2 * (t.residual + t.rstd) + t.residual + 2 * t.wide;
}

// The most of three moments. As SiLU's output has its gradient nothing that was saved is freed yet; as the
// up-projection has its two, both sides of SiLU are; as QKV's projection has its two, all but its input is,
// and only the first norm's weight lacks a gradient.
int64_t backward_of_block(const Tensors& t, int64_t saved) {
  const int64_t down = t.wide + t.ffn_weight;
  const int64_t up = t.residual + 2 * t.ffn_weight - t.wide;
  const int64_t weights = t.attention_weights + 2 * t.ffn_weight + t.vector;
  const int64_t in = t.qkv + t.residual + weights - (saved - t.residual - t.rstd);
  return std::max({down, up, in, t.residual});
}

}  // namespace

shard::EagerMemory eager_memory(const config::Model& model, int64_t rows, DType type) {
  const Tensors t(model, rows, type);
  const int64_t logits = Tensors::of(rows * model.vocab_size, size_of(type));
  const int64_t head_gradients = Tensors::of(model.vocab_size * model.dim, size_of(type)) + t.residual;
  const int64_t final_norm = model.final_norm ? t.residual + t.rstd : 0;
  shard::EagerMemory memory;
  memory.inputs = 2 * Tensors::of(rows, kIndex) + 2 * kScalar;  // the loss, and what it divides by
  memory.residual = t.residual;
  memory.block_saved = saved_by_block(t, model.rope_theta > 0);
  // A branch's output before it is added to the residual stream.
  memory.block_forward_extra = t.residual;
  memory.block_backward = backward_of_block(t, memory.block_saved);
  // The loss's backward pass has log-probabilities, their gradient and that of the logits.
  memory.loss = final_norm + std::max(3 * logits, logits + head_gradients);
  return memory;
}

}  // namespace minillm::model
