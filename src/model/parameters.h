// The table of parameters: the only place that names tensors. Initialisation, layout, saving, loading and
// printing are visitors of it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "config/config.h"
#include "kernels/initialize.h"
#include "shard/layout.h"

namespace minillm::model {

/// Segments of a block: groups of tensors whose gradients are ready, and reduced, together.
enum BlockSegment : int {
  kAttentionInput,   ///< norm1.weight, attn.in_proj_weight, attn.in_proj_bias
  kAttentionOutput,  ///< attn.out_proj.weight, attn.out_proj.bias
  kFeedForward,      ///< norm2.weight, ffn.up.weight, ffn.down.weight
};

/// Segments of a head with a final norm, whose gradient is known last; without one there is the projection
/// only, as segment 0.
enum HeadSegment : int {
  kFinalNorm,   ///< final_norm.weight
  kProjection,  ///< head.weight
};

struct Parameter {
  std::string name;            ///< as PyTorch names it: "layers.3.attn.in_proj_weight"
  std::vector<int64_t> shape;  ///< row-major; Linear weights are [out, in]
  int unit = 0;                ///< 0 the embedding, 1…n_layers the blocks, n_layers + 1 the head
  /// Initial values of PyTorch's layers: N(0, 1) for the embedding, Xavier uniform for the packed QKV
  /// projection, U(±1/√fan_in) for the other Linear weights, 0 for biases, 1 for norms.
  kernels::Distribution distribution = kernels::Distribution::kConstant;
  float a = 0;      ///< parameter of the distribution (kernels/initialize.h)
  int segment = 0;  ///< of the unit: a BlockSegment or HeadSegment; 0 where it has only one
};

/// Rows that the head's weight has in memory: the vocabulary and zeros up to a multiple of 64, so that every
/// dimension and row of its products is aligned. The logits of the others take no part in the loss.
int64_t padded_vocabulary(const config::Model& model);

/// Calls `visit` for every parameter, units in forward order.
void for_each_parameter(const config::Model& model, const std::function<void(const Parameter&)>& visit);

/// The units that are gathered as one: embedding, blocks, head with the final norm. Blocks and heads with a
/// final norm have the segments above, the others one each.
std::vector<shard::UnitSpec> units(const config::Model& model);

}  // namespace minillm::model
