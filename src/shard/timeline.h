// When each operation of a schedule runs, on a machine that does not exist: the same streams, the same waits,
// times from shard/operation_cost.h.
//
// Streams run in order and operations start as soon as what they wait for is done. Operations that use a
// resource at the same time share it equally, so that none is idle and nothing gets faster: two collectives
// on one link take twice as long, an update beside a backward pass slows it down. Latencies are not shared.
// Collectives that are kernels keep multiprocessors from their start to their end, and what else uses the
// device has the rest of it meanwhile: the same part of its speed, be its limit arithmetic or memory.
// The host issues without cost, a step ahead of the device: a step is not issued before the read-backs of the
// step before the last one are done. Every rank is taken to be equally fast.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "shard/operation_cost.h"
#include "shard/schedule.h"
#include "shard/waits.h"

namespace minillm::shard {

struct SimulationOptions {
  /// A step is one CUDA graph: its inputs come when all streams are done with the step before, then the graph
  /// starts on all streams, and read-backs come after all of it.
  bool graph = false;
  /// NCCL_LAUNCH_ORDER_IMPLICIT: a collective does not start before the last one that was issued before it
  /// and is a kernel has started, on whichever communicator. (So from NCCL 2.26 on with drivers for
  /// CUDA 12.3, for graphs 12.9; older ones wait for its end. Those of copy engines wait, and are not waited
  /// for.)
  bool launch_order = false;
  int64_t multiprocessors = 0;  ///< of the device; 0: as many as collectives cannot take anything from
  int steps = 6;  ///< simulated from an idle machine, of which the last but one is reported; at least 3
};

struct OperationTime {
  double start_s = 0;
  double end_s = 0;
  /// The operation whose end let this one start, on its stream or among its waits, its communicator's turn or
  /// the step's start; or whose start did, in the order of launches; -1 for none.
  int after = -1;
  int after_steps_back = 0;
};

/// Sent by a rank in a step, sums of scalars left out.
struct WireBytes {
  int64_t gather = 0;
  int64_t reduce_scatter = 0;
  int64_t all_reduce = 0;
};

struct Timeline {
  /// In the frame of the step: from the end of the step before on the compute stream (0) to that of this one
  /// (step_s). Operations on other streams may start before and end later.
  std::vector<OperationTime> operations;
  double step_s = 0;
  double compute_s = 0;       ///< of step_s, while at least one kernel of the model or the optimizer runs
  double exposed_comm_s = 0;  ///< the rest of it
  WireBytes wire_bytes;
  /// That the operations of a step have of each resource, by Resource: no step is shorter.
  std::array<double, kResourceCount> busy_s{};
};

/// `waits` is derive_waits(schedule), `costs` operation_costs(schedule, …). With schedule.one_communicator
/// gathers, reduce-scatters and sums of scalars start in the order of issue, each when the one before is
/// done, and all-reduces over replicas have a communicator of their own. Without it, gradients and the sums
/// of scalars that are over replicas too take such turns on the replicas' communicator. Throws InternalError
/// for waits or costs of another length than the schedule, negative or non-finite costs, and waits for what
/// is not issued before.
Timeline simulate(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits,
                  const std::vector<OperationCost>& costs, const SimulationOptions& options = {});

/// The time line as text of at most `columns` + 10 columns: for each stream that has operations a line with a
/// letter for what runs, below it its unit; a scale, a legend, and how much communication is exposed. A
/// column shows what takes most of it, a colon where the stream is idle for most of it, and a full stop where
/// it does nothing. A unit is the last digit of its name, or the name's first letter as a capital; without
/// names the last digit of its number.
std::string draw_lanes(const Schedule& schedule, const Timeline& timeline,
                       const std::vector<std::string>& unit_names, int columns = 100);

/// The same for chrome://tracing and Perfetto, as JSON: a thread per stream, an event per operation with its
/// unit, slots, bytes and waits, and an arrow for each wait within the step.
std::string chrome_trace(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits,
                         const std::vector<OperationCost>& costs, const Timeline& timeline,
                         const std::vector<std::string>& unit_names);

}  // namespace minillm::shard
