// Schedules written by hand, for the tests of the simulated timeline.
#pragma once

#include <vector>

#include "shard/timeline.h"

namespace minillm::shard {

/// Operations with their waits and costs; times are whole or binary fractions of seconds, so that results are
/// exact.
struct HandMade {
  Schedule schedule;
  std::vector<std::vector<Wait>> waits;
  std::vector<OperationCost> costs;
  bool launch_order = false;
  int64_t multiprocessors = 0;

  int add(OpKind kind, StreamId stream, OperationCost cost, std::vector<Wait> for_these = {}, int unit = -1) {
    schedule.operations.push_back({.kind = kind, .unit = unit, .stream = stream});
    waits.push_back(std::move(for_these));
    costs.push_back(cost);
    return static_cast<int>(costs.size()) - 1;
  }
  int add_kernel(StreamId stream, double busy_s, std::vector<Wait> for_these = {}) {
    return add(OpKind::kForward, stream, {.busy_s = busy_s}, std::move(for_these));
  }
  int add_gather(double latency_s, double busy_s, std::vector<Wait> for_these = {}) {
    return add(OpKind::kGather, StreamId::kGather, on_link(latency_s, busy_s), std::move(for_these));
  }
  int add_reduce(double latency_s, double busy_s, std::vector<Wait> for_these = {}) {
    return add(OpKind::kReduceScatter, StreamId::kReduce, on_link(latency_s, busy_s), std::move(for_these));
  }

  Timeline eager(int steps = SimulationOptions{}.steps) const {
    return simulate(schedule, waits, costs,
                    {.launch_order = launch_order, .multiprocessors = multiprocessors, .steps = steps});
  }
  /// Every step starts on an idle machine, at 0 in the timeline of a schedule that ends on the compute
  /// stream.
  Timeline graph() const {
    return simulate(schedule, waits, costs,
                    {.graph = true, .launch_order = launch_order, .multiprocessors = multiprocessors});
  }

  static OperationCost on_link(double latency_s, double busy_s) {
    return {.resource = Resource::kLink, .latency_s = latency_s, .busy_s = busy_s};
  }
};

}  // namespace minillm::shard
