#include "train/step_plan.h"

#include <algorithm>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "model/parameters.h"

namespace minillm::train {
namespace {

constexpr int kMostDeferredBlocks = 2;

shard::Policy make_policy(const config::Config& config, const Division& division) {
  const config::Parallel& parallel = config.parallel;
  const int64_t default_weights =
      parallel.policy == "grads" ? std::max(int64_t{2}, config.model.n_layers) : 2;
  const auto chosen = [](int64_t value, int64_t otherwise) {
    return narrow<int>(value > 0 ? value : otherwise);
  };
  shard::Policy policy{.replicas = division.replicas,
                       .weight_slots = chosen(parallel.weight_slots, default_weights),
                       .gradient_slots = chosen(parallel.gradient_slots, 2),
                       .micro_batches = narrow<int>(config.train.grad_accumulation),
                       .reduce_every_micro_batch = parallel.reduce_every_micro_batch,
                       .clip = config.train.grad_clip > 0,
                       .reduce_type = config.precision.reduce};
  policy.recompute.assign(static_cast<size_t>(config.model.n_layers) + 2, false);
  for (int64_t block = 0; block < config.model.n_layers; ++block)
    policy.recompute[static_cast<size_t>(block) + 1] =
        config.memory.recompute_of(block) == config::Recompute::kBlock;
  return policy;
}

/// What does not change while the plan's open choices are made.
class Planner {
 public:
  Planner(const config::Config& config, const World& world, const StepPlanOptions& options)
      : config_(config),
        options_(options),
        division_(divide(config, world)),
        layout_(std::make_unique<const shard::Layout>(
            shard::make_layout(model::units(config.model), division_.shards))) {}

  StepPlan plan() && {
    StepPlan best = config_.train.head_chunk > 0 ? with(config_, options_.deferred_blocks.value_or(0))
                                                 : choose_head_chunk();
    if (!options_.deferred_blocks) best = defer_blocks(std::move(best));
    best.layout = std::move(layout_);
    return best;
  }

 private:
  StepPlan with(const config::Config& config, int deferred_blocks) const {
    StepPlan plan{.config = config, .division = division_, .policy = make_policy(config, division_)};
    plan.policy.deferred_blocks = deferred_blocks;
    plan.policy.keep_gradients = options_.keep_gradients;
    plan.program = std::make_unique<TrainingProgram>(config, *layout_, deferred_blocks,
                                                     options_.rank % division_.shards);
    plan.policy.split_head = plan.program->transformer().splits_head();  // never slower, at no cost
    plan.schedule = shard::build_schedule(*layout_, *plan.program, plan.policy);
    plan.waits = shard::derive_waits(plan.schedule);
    plan.memory = shard::plan_memory(plan.schedule, plan.waits, *layout_, *plan.program,
                                     config.precision.param, config.precision.moments);
    return plan;
  }

  // The product that accumulates the head's gradient reads and writes the whole of it for every chunk, so few
  // are better; and where blocks need more than the head, rows of logits cost nothing.
  StepPlan choose_head_chunk() const {
    constexpr int64_t kLeast = 1024, kMultiple = 128;
    const int deferred = options_.deferred_blocks.value_or(0);
    const int64_t rows = config_.train.micro_batch * config_.train.seq_len;
    config::Config config = config_;
    config.train.head_chunk = std::min(rows, kLeast);
    StepPlan least = with(config, deferred);
    for (int64_t chunks = 1; chunks * kLeast < rows; chunks *= 2) {
      config.train.head_chunk = round_up(ceil_div(rows, chunks), kMultiple);
      StepPlan larger = with(config, deferred);
      if (larger.memory.bytes <= least.memory.bytes) return larger;
    }
    return least;
  }

  // What deferred blocks keep lives at the end of the step, where little else does. One rank has nothing to
  // hide behind them.
  StepPlan defer_blocks(StepPlan none) const {
    if (division_.shards * division_.replicas == 1) return none;
    for (int blocks = std::min<int>(kMostDeferredBlocks, narrow<int>(config_.model.n_layers)); blocks > 0;
         --blocks) {
      StepPlan some = with(none.config, blocks);
      if (some.memory.bytes <= none.memory.bytes) return some;
    }
    return none;
  }

  const config::Config& config_;
  const StepPlanOptions& options_;
  Division division_;
  std::unique_ptr<const shard::Layout> layout_;
};

}  // namespace

Division divide(const config::Config& config, const World& world) {
  const std::string& policy = config.parallel.policy;
  if (policy == "auto") throw InternalError("divide: the policy is not chosen yet");
  if (policy == "replicate") return {1, world.ranks};
  if (policy != "hybrid") return {world.ranks, 1};
  const bool given = config.parallel.group_size > 0;
  const int64_t shards = given ? config.parallel.group_size : std::min(world.ranks, world.ranks_per_node);
  if (world.ranks % shards != 0)
    throw UsageError((given ? "parallel.group_size is " : "parallel.group_size is 0, the ranks of a node: ") +
                     std::to_string(shards) + ", which does not divide the " + std::to_string(world.ranks) +
                     " ranks of the job; parallel.policy \"hybrid\" needs groups of equal size");
  return {narrow<int>(shards), narrow<int>(world.ranks / shards)};
}

StepPlan make_step_plan(const config::Config& config, const World& world, const StepPlanOptions& options) {
  return Planner(config, world, options).plan();
}

int64_t largest_micro_batch(const config::Config& config, const World& world, int64_t bytes) {
  config::Config tried = config;
  int64_t fits = 0, too_large = config.train.micro_batch + 1;
  while (too_large - fits > 1) {
    tried.train.micro_batch = (fits + too_large) / 2;
    const bool holds = make_step_plan(tried, world).memory.bytes <= bytes;
    (holds ? fits : too_large) = tried.train.micro_batch;
  }
  return fits;
}

}  // namespace minillm::train
