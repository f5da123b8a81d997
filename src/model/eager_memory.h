// What the same model takes in eager PyTorch, for the plan that stands beside ours.
#pragma once

#include <cstdint>

#include "config/config.h"
#include "core/dtype.h"
#include "shard/fsdp2.h"

namespace minillm::model {

/// Bytes for a micro-batch of `rows` tokens (batch × sequence) on one rank, activations in `type`.
///
/// Assumes the best of what stock layers offer: scaled_dot_product_attention with a flash kernel (no
/// probabilities), fused RMSNorm, cross_entropy on logits in `type`, no recomputation, no compilation, a
/// script that does not hold the logits, and tables of rotary angles that all layers share, which are not
/// counted. With shard::live_memory the result is what PyTorch 2.15 allocates, to the byte: the tests hold
/// measured figures.
shard::EagerMemory eager_memory(const config::Model& model, int64_t rows, DType type);

}  // namespace minillm::model
