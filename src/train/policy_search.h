// parallel.policy "auto": which policy, slots and recomputation are fastest on a model of the hardware,
// within the memory there is.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "shard/hardware.h"
#include "train/step_plan.h"

namespace minillm::train {

struct Candidate {
  config::Config config;   ///< with an explicit policy, slots and recomputation
  int64_t head_chunk = 0;  ///< rows of logits at a time: train.head_chunk, or what the plan chose
  int64_t bytes = 0;
  double step_s = 0;
  double exposed_comm_s = 0;
  bool fits = false;
};

struct PolicySearch {
  std::vector<Candidate> candidates;  ///< in the order in which they were tried
  /// The fastest that fits, or one that is hardly slower (0.1 %) and needs least memory; empty: none fits.
  std::optional<size_t> best;

  /// All candidates, the best one marked: one line each, for people.
  std::string table() const;
};

/// Tries every policy and group size with every recomputation and two slots, then for the fastest ones that
/// fit more slots and all logits at once (train.head_chunk, unless it is given), with which the head's
/// gradients leave earlier. Then, where memory is what keeps a faster recomputation from more blocks, a mix
/// of two. A pure function: all ranks choose alike. `config` has policy "auto"; `bytes` is what the plan may
/// take.
PolicySearch search_policy(const config::Config& config, const World& world, const shard::Hardware& hardware,
                           int64_t bytes);

/// The configuration of the best candidate. Throws MemoryError with the table and advice when none fits.
config::Config chosen_of(const PolicySearch& search, const World& world, int64_t bytes);

}  // namespace minillm::train
