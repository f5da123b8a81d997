// From a configuration and a number of ranks to everything about a training step that is decided before it
// runs: who shares a model, the layout, the operations with their waits, and the place of every byte.
//
// Needs no device and no other rank: the trainer executes what is made here, `minillm plan` shows it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "shard/builder.h"
#include "shard/layout.h"
#include "shard/memory_plan.h"
#include "shard/schedule.h"
#include "shard/waits.h"
#include "train/training_program.h"

namespace minillm::train {

/// The ranks of a job, and how many of them share a node.
struct World {
  int ranks = 1;
  int ranks_per_node = 1;
};

/// `shards` consecutive ranks share one copy of the model; there are `replicas` copies.
struct Division {
  int shards = 1;
  int replicas = 1;
};
/// Of every policy but "auto". Throws UsageError naming parallel.group_size, or what took its place, and the
/// number of ranks when it does not divide them.
Division divide(const config::Config& config, const World& world);

struct StepPlan {
  config::Config config;  ///< with train.head_chunk chosen
  Division division = {};
  shard::Policy policy = {};
  std::unique_ptr<const shard::Layout> layout = {};
  std::unique_ptr<TrainingProgram> program = {};
  shard::Schedule schedule = {};
  std::vector<std::vector<shard::Wait>> waits = {};
  shard::MemoryPlan memory = {};
};

struct StepPlanOptions {
  int rank = 0;                 ///< whose shards the program updates
  bool keep_gradients = false;  ///< gradient shards last until the next step, for those who read them
  std::optional<int> deferred_blocks = {};  ///< as in shard::Policy; default: chosen
};

/// Chooses what the configuration leaves to the memory plan: train.head_chunk 0 becomes 1024 rows, or as many
/// more as need no more memory than those; and as many blocks defer their weight gradients, up to two, as
/// need no more memory than none. The policy is not "auto". Throws what divide() and shard::build_schedule()
/// throw.
StepPlan make_step_plan(const config::Config& config, const World& world,
                        const StepPlanOptions& options = {});

/// The largest train.micro_batch, at most that of `config`, whose plan takes at most `bytes`; 0 if none does.
int64_t largest_micro_batch(const config::Config& config, const World& world, int64_t bytes);

}  // namespace minillm::train
