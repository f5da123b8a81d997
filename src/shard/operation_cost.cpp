#include "shard/operation_cost.h"

#include <algorithm>
#include <bit>

#include "core/checked.h"
#include "core/error.h"

namespace minillm::shard {
namespace {

/// The ranks r, r + stride, r + 2 stride … of every collective of a kind.
struct Group {
  int64_t ranks = 1;
  int64_t stride = 1;
};

Group group_of(OpKind kind, const Schedule& schedule) {
  switch (kind) {
    case OpKind::kAllReduceGradient:
      return {schedule.replicas, schedule.shards};
    case OpKind::kAllReduceCount:
    case OpKind::kAllReduceLoss:
      return {schedule.world(), 1};
    default:
      return {schedule.shards, 1};
  }
}

bool is_all_reduce(OpKind kind) {
  return is_collective(kind) && kind != OpKind::kGather && kind != OpKind::kReduceScatter;
}

bool is_scalar(OpKind kind) {
  return is_all_reduce(kind) && kind != OpKind::kAllReduceGradient;
}

/// The most ranks of one group that a node holds. Groups that do not divide a node lie across nodes, some of
/// them at least, and the slowest counts.
int64_t ranks_within_node(const Group& group, int64_t world, int64_t node) {
  const int64_t span = group.ranks * group.stride;
  if (world <= node || node % span == 0) return group.ranks;
  return std::clamp<int64_t>(node / group.stride, 1, group.ranks - 1);
}

int64_t wire_bytes(const Operation& operation, const Layout& layout, const Schedule& schedule, int64_t ranks,
                   DType parameter_type) {
  if (is_scalar(operation.kind)) return 0;
  int64_t shard_elements = 0;
  for (const Segment& segment :
       segments_of(layout.units.at(static_cast<size_t>(operation.unit)), operation.segment))
    shard_elements += segment.shard_elements;
  if (operation.kind == OpKind::kAllReduceGradient)
    return 2 * (ranks - 1) * shard_elements * size_of(DType::kFp32) / ranks;
  const DType type = operation.kind == OpKind::kGather ? parameter_type : schedule.reduce_type;
  return (ranks - 1) * shard_elements * size_of(type);
}

[[noreturn]] void throw_unknown(const Hardware& hardware, const Operation& operation, const char* key,
                                const char* what, const char* remedy) {
  throw UsageError("hardware '" + hardware.name + "': '" + name_of(operation.kind) + "' needs to know " +
                   what + ", and '" + key + "' is not given; " + remedy);
}

int64_t ctas_of(OpKind kind, bool within_node, const Hardware& hardware, const CollectiveSettings& settings) {
  if (is_scalar(kind)) return 1;
  if (kind == OpKind::kGather && settings.copy_engines && within_node) return 0;
  const int64_t most = kind == OpKind::kGather ? settings.gather_ctas : settings.reduce_ctas;
  const int64_t chosen = std::max<int64_t>(hardware.collective_ctas, 1);
  return most > 0 ? std::min(most, chosen) : chosen;
}

OperationCost collective_cost(const Operation& operation, const Schedule& schedule, const Layout& layout,
                              const Hardware& hardware, DType parameter_type,
                              const CollectiveSettings& settings) {
  const Group group = group_of(operation.kind, schedule);
  if (group.ranks == 1) return {};
  if (!hardware.link || hardware.link->bytes_per_s <= 0)
    throw_unknown(
        hardware, operation, "link", "how the ranks of a node are connected",
        R"(add "link": {"latency_s": …, "bytes_per_s": …, "ranks": …} with its figures to the description)");
  const int64_t within = ranks_within_node(group, schedule.world(), hardware.link->ranks);
  const int64_t nodes = ceil_div(group.ranks, within);
  if (nodes > 1 && (!hardware.network || hardware.network->bytes_per_s <= 0))
    throw_unknown(
        hardware, operation, "network", "how nodes are connected",
        R"(add "network": {"latency_s": …, "bytes_per_s": …} with its figures to the description, or pass )"
        "--network to minillm plan");

  const Network network = nodes > 1 ? *hardware.network : Network{};
  const bool all_reduce = is_all_reduce(operation.kind);
  const int64_t link_hops = all_reduce ? 2 * (within - 1) : group.ranks - nodes;
  const auto levels = static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(nodes - 1)));  // of a tree
  const int64_t network_hops = all_reduce ? 2 * levels : nodes - 1;
  const double rate =
      nodes == 1 ? hardware.link->bytes_per_s
                 : std::min(hardware.link->bytes_per_s, static_cast<double>(within) * network.bytes_per_s);

  OperationCost cost{.resource = nodes == 1 ? Resource::kLink : Resource::kNetwork};
  cost.latency_s = hardware.kernel_s + static_cast<double>(link_hops) * hardware.link->latency_s +
                   static_cast<double>(network_hops) * network.latency_s;
  cost.wire_bytes = wire_bytes(operation, layout, schedule, group.ranks, parameter_type);
  cost.busy_s = static_cast<double>(cost.wire_bytes) / rate;
  cost.ctas = ctas_of(operation.kind, nodes == 1, hardware, settings);
  return cost;
}

double flops_per_s(KernelWork::Unit unit, const Hardware& hardware) {
  return unit == KernelWork::Unit::kAttention ? hardware.attention_flops_per_s : hardware.gemm_flops_per_s;
}

OperationCost kernels_cost(std::span<const KernelWork> work, const Hardware& hardware) {
  OperationCost cost;
  for (const KernelWork& kernel : work) {
    double busy_s =
        static_cast<double>(kernel.cost.bytes + kernel.cost.extra_bytes) / hardware.memory_bytes_per_s;
    if (kernel.unit != KernelWork::Unit::kOther)
      busy_s = std::max(busy_s, static_cast<double>(kernel.cost.flops) / flops_per_s(kernel.unit, hardware));
    cost.latency_s += hardware.kernel_s;
    cost.busy_s += busy_s;
  }
  return cost;
}

}  // namespace

bool is_copy(OpKind kind) {
  return kind == OpKind::kCopyIn || kind == OpKind::kCopyOut || kind == OpKind::kReduceCopyIn;
}

OperationCost operation_cost(const Operation& operation, const Schedule& schedule, const Layout& layout,
                             std::span<const KernelWork> work, const Hardware& hardware, DType parameter_type,
                             const CollectiveSettings& settings) {
  if (layout.world != schedule.shards)
    throw InternalError("operation_cost: the layout is for " + std::to_string(layout.world) +
                        " shards, the schedule for " + std::to_string(schedule.shards));
  if (is_collective(operation.kind))
    return collective_cost(operation, schedule, layout, hardware, parameter_type, settings);
  return kernels_cost(work, hardware);
}

std::vector<OperationCost> operation_costs(const Schedule& schedule, const Layout& layout,
                                           const WorkOf& work_of, const Hardware& hardware,
                                           DType parameter_type, const CollectiveSettings& settings) {
  std::vector<OperationCost> costs;
  costs.reserve(schedule.operations.size());
  for (const Operation& operation : schedule.operations) {
    std::vector<KernelWork> work;
    if (!is_collective(operation.kind)) work = work_of(operation);
    costs.push_back(operation_cost(operation, schedule, layout, work, hardware, parameter_type, settings));
  }
  return costs;
}

std::vector<OperationCost> operation_costs(const Schedule& schedule, const Layout& layout,
                                           const Program& program, const Hardware& hardware,
                                           DType parameter_type, const CollectiveSettings& settings) {
  const auto work_of = [&](const Operation& operation) {
    if (is_copy(operation.kind))
      throw InternalError("operation_costs: '" + describe(operation, layout.unit_names()) +
                          "' is no work of a program; what it moves has to be given");
    return program.work(operation);
  };
  return operation_costs(schedule, layout, work_of, hardware, parameter_type, settings);
}

}  // namespace minillm::shard
