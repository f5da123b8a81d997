#include "model/eager_memory.h"

#include <algorithm>

namespace minillm::model {
namespace {

constexpr int64_t kFloat = 4, kIndex = 8;  // bytes of fp32 statistics and of PyTorch's token ids

// Elements of a token that a block saves beside its input: both norms' outputs, QKV, the attention's output
// as the kernel leaves it and again as the projection reads it, the residual between, and the two sides of
// SiLU.
int64_t saved_elements(const config::Model& model) {
  const int64_t rotated = model.rope_theta > 0 ? 2 * model.dim : 0;  // of Q and K: not in place
  const int64_t normed = 2 * model.dim, qkv = 3 * model.dim, attention = 2 * model.dim, middle = model.dim;
  return normed + qkv + rotated + attention + middle + 2 * model.ffn_dim;
}

}  // namespace

shard::EagerMemory eager_memory(const config::Model& model, int64_t rows, DType type) {
  const int64_t size = size_of(type);
  const int64_t residual = rows * model.dim * size;
  const int64_t statistics = rows * kFloat * (model.n_heads + 2);  // log-sum-exp and the norms' rstd
  const int64_t logits = rows * model.vocab_size * size;
  const int64_t head_gradients = model.vocab_size * model.dim * size + residual;
  const int64_t final_norm = model.final_norm ? residual + rows * kFloat : 0;
  shard::EagerMemory memory;
  memory.inputs = 2 * rows * kIndex;
  memory.residual = residual;
  memory.block_saved = rows * saved_elements(model) * size + statistics;
  // A branch's output before it is added to the residual stream.
  memory.block_forward_extra = residual;
  // Nothing that was saved is freed yet when SiLU's output has its gradient; the block's input has none then.
  memory.block_backward_extra = std::max<int64_t>(0, rows * (model.ffn_dim - model.dim) * size);
  // The loss's backward pass has log-probabilities, their gradient and that of the logits.
  memory.loss = final_norm + std::max(3 * logits, logits + head_gradients);
  return memory;
}

}  // namespace minillm::model
