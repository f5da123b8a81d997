// What the tests of plans share: the reference model, and machines to plan it for.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "shard/hardware.h"
#include "train/step_plan.h"

namespace minillm::train::test {

inline config::Config reference(const std::vector<std::string>& overrides = {}) {
  return config::load(MINILLM_SOURCE_DIR "/configs/minillm.json", overrides);
}

/// Small enough to be planned hundreds of times.
inline config::Config small(const std::vector<std::string>& overrides = {}) {
  return config::parse(R"({
    "model": {"vocab_size": 1000, "dim": 256, "n_layers": 4, "n_heads": 4},
    "train": {"steps": 1, "micro_batch": 4, "seq_len": 256}
  })",
                       "small", overrides);
}

inline World node(int ranks) {
  return {.ranks = ranks, .ranks_per_node = ranks};
}

inline shard::Hardware h100() {
  return shard::hardware_by_name("h100");
}

}  // namespace minillm::train::test
