#include "train/evaluation.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "model/eager_memory.h"
#include "model/parameters.h"
#include "shard/fsdp2.h"

namespace minillm::train {
namespace {

using shard::KernelWork;
using shard::OpKind;

double model_operations(const std::vector<KernelWork>& work) {
  double flops = 0;
  for (const KernelWork& kernel : work)
    if (kernel.unit != KernelWork::Unit::kOther) flops += static_cast<double>(kernel.cost.flops);
  return flops;
}

std::vector<shard::OperationCost> fsdp2_costs(const StepPlan& plan, const shard::Hardware& hardware) {
  const DType type = plan.config.precision.param;
  const auto work_of = [&](const shard::Operation& operation) {
    std::vector<KernelWork> work;
    if (const int64_t bytes = shard::copy_bytes(operation, *plan.layout, type); bytes > 0)
      work.push_back({KernelWork::Unit::kOther, {.bytes = bytes}});
    else if (!shard::is_copy(operation.kind))
      work = plan.program->work(operation);
    return work;
  };
  return shard::operation_costs(plan.schedule, *plan.layout, work_of, hardware, type);
}

/// The configuration that FSDP2's plan is made from, and what of the given one it goes without.
config::Config stock_of(const config::Config& config, std::vector<std::string>& left_out) {
  config::Config stock = config;
  const auto leave_out = [&](auto& member, const auto& value, const char* key) {
    if (member == value) return;
    member = value;
    left_out.emplace_back(key);
  };
  leave_out(stock.memory.recompute, std::vector{config::Recompute::kNone}, "memory.recompute");
  leave_out(stock.parallel.weight_slots, 0, "parallel.weight_slots");
  leave_out(stock.parallel.gradient_slots, 0, "parallel.gradient_slots");
  leave_out(stock.parallel.reduce_every_micro_batch, true, "parallel.reduce_every_micro_batch");
  leave_out(stock.precision.reduce, DType::kFp32, "precision.reduce");
  leave_out(stock.precision.moments, DType::kFp32, "precision.moments");
  leave_out(stock.train.cuda_graph, false, "train.cuda_graph");
  return stock;
}

}  // namespace

double Evaluation::tokens_per_s() const {
  const config::Train& train = plan.config.train;
  return static_cast<double>(train.grad_accumulation * train.micro_batch * train.seq_len) / timeline.step_s;
}

// The head's operations, be it one or two, hold its forward pass and twice as much of its backward pass.
double Evaluation::model_flops() const {
  const int head = static_cast<int>(plan.layout->units.size()) - 1;
  double flops = 0;
  for (const shard::Operation& operation : plan.schedule.operations) {
    const bool of_head = operation.unit == head &&
                         (operation.kind == OpKind::kHeadLoss || operation.kind == OpKind::kBackwardInput);
    if (operation.kind == OpKind::kForward) flops += 3 * model_operations(plan.program->work(operation));
    if (of_head) flops += model_operations(plan.program->work(operation));
  }
  return flops;
}

double Evaluation::mfu(const shard::Hardware& hardware) const {
  return hardware.peak_flops_per_s ? model_flops() / timeline.step_s / *hardware.peak_flops_per_s : 0;
}

Evaluation evaluate(const config::Config& config, const World& world, const shard::Hardware& hardware) {
  Evaluation result{.policy = config.parallel.policy, .world = world, .plan = make_step_plan(config, world)};
  const StepPlan& plan = result.plan;
  const config::Parallel& parallel = config.parallel;
  const shard::CollectiveSettings settings{
      .gather_ctas = parallel.gather_ctas,
      .reduce_ctas = parallel.reduce_ctas,
      .copy_engines = parallel.copy_engines && !config.train.cuda_graph};  // as the trainer makes them
  result.costs = shard::operation_costs(plan.schedule, *plan.layout, *plan.program, hardware,
                                        config.precision.param, settings);
  result.timeline = shard::simulate(plan.schedule, plan.waits, result.costs,
                                    {.graph = config.train.cuda_graph,
                                     .launch_order = true,  // comm/communicator asks NCCL for it
                                     .multiprocessors = hardware.multiprocessors});
  return result;
}

Evaluation evaluate_fsdp2(const config::Config& config, const World& world, const shard::Hardware& hardware) {
  if (config.parallel.policy != "full" && config.parallel.policy != "hybrid")
    throw UsageError(
        "policy \"fsdp2\" shards as parallel.policy \"full\" or \"hybrid\" do; parallel.policy is \"" +
        config.parallel.policy + "\"");
  std::vector<std::string> left_out;
  const config::Config stock = stock_of(config, left_out);
  Evaluation result{.policy = "fsdp2",
                    .world = world,
                    .plan = make_step_plan(stock, world, {.deferred_blocks = 0}),
                    .left_out = std::move(left_out)};
  StepPlan& plan = result.plan;
  const config::Train& train = stock.train;
  const shard::Fsdp2 step = shard::build_fsdp2(
      *plan.layout,
      {.replicas = plan.division.replicas,
       .micro_batches = plan.policy.micro_batches,
       .clip = plan.policy.clip,
       .parameter_type = stock.precision.param,
       .memory = model::eager_memory(stock.model, train.micro_batch * train.seq_len, stock.precision.param)});
  plan.memory = shard::live_memory(step, *plan.layout);
  plan.schedule = step.schedule;
  plan.waits = shard::derive_waits(plan.schedule);
  result.costs = fsdp2_costs(plan, hardware);
  result.timeline =
      shard::simulate(plan.schedule, plan.waits, result.costs, {.multiprocessors = hardware.multiprocessors});
  return result;
}

}  // namespace minillm::train
