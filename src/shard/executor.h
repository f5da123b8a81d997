// Runs a schedule: walks the list, makes each operation wait for what derive_waits says, and issues it on its
// stream; or captures the whole step once as a CUDA graph and launches that. The host never blocks inside a
// step.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/dtype.h"
#include "cuda/graph.h"
#include "cuda/stream.h"
#include "shard/layout.h"
#include "shard/memory_plan.h"
#include "shard/program.h"
#include "shard/schedule.h"
#include "shard/waits.h"

namespace minillm::shard {

/// The collectives' communicators. Gathers and reductions have one each, since two streams on one
/// communicator take turns on the wire; both are null when a rank has the whole model. `replicate` spans the
/// ranks with the same shard of other replicas and is null when there is one replica.
struct Communicators {
  comm::Communicator* gather = nullptr;
  comm::Communicator* reduce = nullptr;
  comm::Communicator* replicate = nullptr;
};

enum class Launch : uint8_t {
  kEager,  ///< operation by operation
  kGraph,  ///< all but what touches the host as one CUDA graph, captured at the second step
};

class Executor {
 public:
  /// Everything passed by reference or pointer outlives this object; `arena` is plan.bytes of device memory.
  /// `waits` is derive_waits(schedule), given so that tests can leave one out.
  /// Shards are initialised by the caller before the first step. Throws InternalError for a wait that names
  /// an operation not issued before the one that waits, and for communicators that do not fit the schedule.
  Executor(const Schedule& schedule, const Layout& layout, const MemoryPlan& plan,
           std::vector<std::vector<Wait>> waits, Program& program, Communicators communicators,
           std::byte* arena, DType parameter_type, Launch launch = Launch::kEager);

  /// Called after each operation of a step is put on its stream, with its index in the schedule and before
  /// its end is recorded: what the observer enqueues there is part of it, and of the graph if the operation
  /// is. For measurements.
  using Observer = std::function<void(int operation, cudaStream_t stream)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }

  /// Enqueues one step; allocates no device memory. Throws what the program and the communicators throw.
  void step();

  /// Tells that somebody else changed parameter shards: weights that were gathered for the next step are
  /// gathered again.
  void weights_changed() { gathered_ahead_ = false; }

  /// Blocks until all enqueued steps are done. Throws DeviceError for their errors.
  void synchronize();

  cudaStream_t stream(StreamId id) const;

 private:
  bool is_used(StreamId id) const;
  Operands operands(const Operation& operation) const;
  void issue(const Operation& operation, cudaStream_t on);
  void issue_observed(size_t index, cudaStream_t on);
  void communicate(const Operation& operation, cudaStream_t on);
  void gather(const Operation& operation, cudaStream_t on);
  void reduce_scatter(const Operation& operation, cudaStream_t on);
  void all_reduce(const Operation& operation, cudaStream_t on);
  void sum_over_ranks(float* value, cudaStream_t on) const;
  float* floats(int64_t offset) const { return reinterpret_cast<float*>(arena_ + offset); }
  void issue_in_order(size_t index, bool captures);
  void gather_ahead();
  void run_eagerly();
  void run_graph();
  void capture();

  const Schedule& schedule_;
  const Layout& layout_;
  const MemoryPlan& plan_;
  std::vector<std::vector<Wait>> waits_;
  Program& program_;
  Communicators communicators_;
  std::byte* arena_;
  DType parameter_type_;
  Launch launch_;
  Observer observer_;
  std::vector<std::byte*> buffers_;
  std::vector<cuda::Stream> streams_;       // by StreamId
  std::vector<cuda::Event> events_;         // of the operations that some other waits for
  std::vector<int> event_of_operation_;     // -1: nobody waits for it
  std::vector<cuda::Event> fork_and_join_;  // by StreamId; at the ends of a captured step
  std::optional<cuda::Graph> graph_;
  bool gathered_ahead_ = false;
  bool ran_before_ = false;
};

}  // namespace minillm::shard
