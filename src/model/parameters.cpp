#include "model/parameters.h"

#include <cmath>

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
  const auto norm = [&](const std::string& name, int unit) {
    visit({name, {dim}, unit, Distribution::kConstant, 1.0f});
  };

  visit({"embedding.weight", {vocabulary, dim}, 0, Distribution::kNormal, 1.0f});
  for (int unit = 1; unit < head; ++unit) {
    const std::string block = "layers." + std::to_string(unit - 1) + ".";
    norm(block + "norm1.weight", unit);
    visit({block + "attn.in_proj_weight",
           {3 * dim, dim},
           unit,
           Distribution::kUniform,
           xavier_bound(dim, 3 * dim)});
    visit({block + "attn.in_proj_bias", {3 * dim}, unit, Distribution::kConstant, 0.0f});
    visit({block + "attn.out_proj.weight", {dim, dim}, unit, Distribution::kUniform, linear_bound(dim)});
    visit({block + "attn.out_proj.bias", {dim}, unit, Distribution::kConstant, 0.0f});
    norm(block + "norm2.weight", unit);
    visit({block + "ffn.up.weight", {ffn, dim}, unit, Distribution::kUniform, linear_bound(dim)});
    visit({block + "ffn.down.weight", {dim, ffn}, unit, Distribution::kUniform, linear_bound(ffn)});
  }
  if (model.final_norm) norm("final_norm.weight", head);
  visit({kHeadWeight, {vocabulary, dim}, head, Distribution::kUniform, linear_bound(dim)});
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
    units[static_cast<size_t>(p.unit)].tensors.push_back({p.name, p.shape, reserved});
  });
  return units;
}

}  // namespace minillm::model
