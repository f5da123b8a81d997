// The ways to run the toy that tests of the executor go through.
#pragma once

#include <string>
#include <vector>

#include "fixtures.h"
#include "toy.h"

namespace minillm::shard {

struct NamedPolicy {
  std::string name;
  int shards = 1;  ///< ranks that share a model
  Policy policy;
  DType type = DType::kBf16;
  bool final_norm = false;  ///< whether the head has two segments
};

inline constexpr int kToyBlocks = 5;
inline constexpr int64_t kToyDim = 19;  // leaves gaps between slices, so that padding is there to be wrong

inline Layout toy_layout(int shards, int blocks = kToyBlocks, bool final_norm = false) {
  return make_layout(
      final_norm ? make_units_with_norm(blocks, kToyDim) : make_segmented_units(blocks, kToyDim), shards);
}

inline Layout layout_of(const NamedPolicy& named) {
  return toy_layout(named.shards, kToyBlocks, named.final_norm);
}

/// Every feature of the builder at least once, alone and with those that it meets.
inline std::vector<NamedPolicy> toy_policies(int world) {
  const std::vector<bool> some{false, true, false, true, true, false, false};
  const std::vector<NamedPolicy> base{
      {"default", world, {}},
      {"fp32 parameters", world, {}, DType::kFp32},
      {"weights kept", world, {.weight_slots = kToyBlocks}},
      {"more slots", world, {.weight_slots = 3, .gradient_slots = 3}},
      {"one gradient slot", world, {.gradient_slots = 1, .deferred_blocks = 1}},
      {"deferred", world, {.deferred_blocks = 2}},
      {"all deferred", world, {.deferred_blocks = kToyBlocks}},
      {"clip", world, {.deferred_blocks = 1, .clip = true}},
      {"gradients kept", world, {.deferred_blocks = 1, .keep_gradients = true}},
      {"recompute", world, {.deferred_blocks = 1, .recompute = some}},
      {"bf16 reduction", world, {.deferred_blocks = 1, .reduce_type = DType::kBf16}},
      {"accumulation", world, {.deferred_blocks = 2, .micro_batches = 3}},
      {"accumulation, unreduced",
       world,
       {.deferred_blocks = 1, .micro_batches = 2, .reduce_every_micro_batch = false}},
      {"accumulation, bf16, kept",
       world,
       {.micro_batches = 2,
        .clip = true,
        .keep_gradients = true,
        .reduce_type = DType::kBf16,
        .recompute = some}},
      {"accumulation, bf16, unreduced",
       world,
       {.deferred_blocks = 2,
        .micro_batches = 3,
        .reduce_every_micro_batch = false,
        .reduce_type = DType::kBf16}},
      {"split head", world, {.deferred_blocks = 1, .split_head = true}},
      {"split head, final norm",
       world,
       {.deferred_blocks = 2, .split_head = true},
       DType::kBf16,
       /*final_norm=*/true},
      {"split head, final norm, one gradient slot, clip",
       world,
       {.gradient_slots = 1, .split_head = true, .clip = true},
       DType::kFp32,
       /*final_norm=*/true},
      {"split head, final norm, accumulation, bf16",
       world,
       {.split_head = true, .micro_batches = 2, .keep_gradients = true, .reduce_type = DType::kBf16},
       DType::kBf16,
       /*final_norm=*/true},
      {"split head, final norm, accumulation, unreduced",
       world,
       {.split_head = true, .micro_batches = 2, .reduce_every_micro_batch = false},
       DType::kBf16,
       /*final_norm=*/true}};
  std::vector<NamedPolicy> all = base;
  for (int shards = 1; shards < world; ++shards) {
    if (world % shards != 0) continue;
    for (const char* name :
         {"default", "fp32 parameters", "clip", "deferred", "accumulation", "accumulation, bf16, kept",
          "split head, final norm", "split head, final norm, accumulation, bf16"})
      for (NamedPolicy policy : base)
        if (policy.name == name) {
          policy.name += ", models on " + std::to_string(shards);
          policy.shards = shards;
          policy.policy.replicas = world / shards;
          all.push_back(policy);
        }
  }
  return all;
}

}  // namespace minillm::shard
