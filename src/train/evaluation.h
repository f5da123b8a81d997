// A step of a configuration on hardware that is not there: its plan, and when each operation would run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"
#include "shard/hardware.h"
#include "shard/operation_cost.h"
#include "shard/timeline.h"
#include "train/step_plan.h"

namespace minillm::train {

struct Evaluation {
  std::string policy;  ///< "full", …, or "fsdp2"
  World world;
  StepPlan plan;  ///< of "fsdp2": its schedule, waits and live memory, and our program for its kernels
  std::vector<shard::OperationCost> costs = {};
  shard::Timeline timeline = {};
  std::vector<std::string> left_out = {};  ///< keys of settings that "fsdp2" goes without

  double tokens_per_s() const;  ///< of a rank
  /// Floating-point operations of a step of one rank that any implementation needs: three forward passes.
  double model_flops() const;
  double mfu(const shard::Hardware& hardware) const;  ///< 0 where the peak is not known
};

/// The policy is not "auto". Throws what make_step_plan() and shard::operation_costs() throw.
Evaluation evaluate(const config::Config& config, const World& world, const shard::Hardware& hardware);

/// The same for PyTorch FSDP2 with our kernels (shard/fsdp2.h): full sharding, or, where `config` says
/// hybrid, HSDP. Settings that FSDP2's plan does not have (recomputation, numbers of slots, other precisions
/// than fp32 for reductions and moments, keeping unreduced gradients, CUDA graphs) are left out and listed.
/// Throws UsageError for other policies.
Evaluation evaluate_fsdp2(const config::Config& config, const World& world, const shard::Hardware& hardware);

}  // namespace minillm::train
