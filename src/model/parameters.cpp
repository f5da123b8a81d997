#include "model/parameters.h"

#include <cmath>
#include <utility>

#include "core/checked.h"

namespace minillm::model {
namespace {

using kernels::Distribution;

constexpr const char* kHeadWeight = "head.weight";

float linear_bound(int64_t fan_in) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(fan_in)));
}

float xavier_bound(int64_t fan_in, int64_t fan_out) {
  return static_cast<float>(std::sqrt(6.0 / static_cast<double>(fan_in + fan_out)));
}

}  // namespace

int64_t padded_vocabulary(const config::Model& model) {
  return round_up(model.vocab_size, 64);
}

void for_each_parameter(const config::Model& model, const std::function<void(const Parameter&)>& visit) {
  const int64_t dim = model.dim, ffn = model.ffn_dim, vocabulary = model.vocab_size;
  const int head = static_cast<int>(model.n_layers) + 1;
  const auto norm = [&](const std::string& name, int unit, int segment) {
    visit({name, {dim}, unit, Distribution::kConstant, 1.0f, segment});
  };
  const auto uniform = [&](const std::string& name, std::vector<int64_t> shape, int unit, float bound,
                           int segment) {
    visit({name, std::move(shape), unit, Distribution::kUniform, bound, segment});
  };
  const auto zeros = [&](const std::string& name, int64_t elements, int unit, int segment) {
    visit({name, {elements}, unit, Distribution::kConstant, 0.0f, segment});
  };

  visit({"embedding.weight", {vocabulary, dim}, 0, Distribution::kNormal, 1.0f});
  for (int unit = 1; unit < head; ++unit) {
    const std::string block = "layers." + std::to_string(unit - 1) + ".";
    norm(block + "norm1.weight", unit, kAttentionInput);
    uniform(block + "attn.in_proj_weight", {3 * dim, dim}, unit, xavier_bound(dim, 3 * dim), kAttentionInput);
    zeros(block + "attn.in_proj_bias", 3 * dim, unit, kAttentionInput);
    uniform(block + "attn.out_proj.weight", {dim, dim}, unit, linear_bound(dim), kAttentionOutput);
    zeros(block + "attn.out_proj.bias", dim, unit, kAttentionOutput);
    norm(block + "norm2.weight", unit, kFeedForward);
    uniform(block + "ffn.up.weight", {ffn, dim}, unit, linear_bound(dim), kFeedForward);
    uniform(block + "ffn.down.weight", {dim, ffn}, unit, linear_bound(ffn), kFeedForward);
  }
  if (model.final_norm) norm("final_norm.weight", head, kFinalNorm);
  uniform(kHeadWeight, {vocabulary, dim}, head, linear_bound(dim), model.final_norm ? kProjection : 0);
}

std::vector<shard::UnitSpec> units(const config::Model& model) {
  constexpr int kBlocks = 0, kEnds = 1;  // slot groups
  std::vector<shard::UnitSpec> units;
  units.push_back({"embedding", {}, kEnds});
  for (int64_t layer = 0; layer < model.n_layers; ++layer)
    units.push_back({"block" + std::to_string(layer), {}, kBlocks});
  units.push_back({"head", {}, kEnds});
  for_each_parameter(model, [&](const Parameter& p) {
    const int64_t reserved = p.name == kHeadWeight ? padded_vocabulary(model) * model.dim : 0;
    units[static_cast<size_t>(p.unit)].tensors.push_back({p.name, p.shape, reserved, p.segment});
  });
  return units;
}

}  // namespace minillm::model
