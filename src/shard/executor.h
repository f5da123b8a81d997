// Runs a schedule: walks the list, makes each operation wait for what derive_waits says, and issues it on its
// stream. The host never blocks inside a step.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "comm/communicator.h"
#include "core/dtype.h"
#include "cuda/stream.h"
#include "shard/layout.h"
#include "shard/memory_plan.h"
#include "shard/program.h"
#include "shard/schedule.h"
#include "shard/waits.h"

namespace minillm::shard {

/// The collectives' communicators: one for gathers and one for reductions, since two streams on one
/// communicator take turns on the wire. Both null when world is 1.
struct Communicators {
  comm::Communicator* gather = nullptr;
  comm::Communicator* reduce = nullptr;
};

class Executor {
 public:
  /// Everything passed by reference or pointer outlives this object; `arena` is plan.bytes of device memory.
  /// `waits` is derive_waits(schedule), given so that tests can leave one out.
  /// Shards are initialised by the caller before the first step. Throws InternalError for a wait that names
  /// an operation not issued before the one that waits, and for communicators that do not fit the schedule's
  /// world.
  Executor(const Schedule& schedule, const Layout& layout, const MemoryPlan& plan,
           std::vector<std::vector<Wait>> waits, Program& program, Communicators communicators,
           std::byte* arena, DType parameter_type);

  /// Enqueues one step; allocates nothing. Throws what the program and the communicators throw.
  void step();

  /// Blocks until all enqueued steps are done. Throws DeviceError for their errors.
  void synchronize();

  cudaStream_t stream(StreamId id) const;

 private:
  Operands operands(const Operation& operation) const;
  void issue(const Operation& operation);

  const Schedule& schedule_;
  const Layout& layout_;
  const MemoryPlan& plan_;
  std::vector<std::vector<Wait>> waits_;
  Program& program_;
  Communicators communicators_;
  std::byte* arena_;
  DType parameter_type_;
  std::vector<std::byte*> buffers_;
  std::vector<cuda::Stream> streams_;    // by StreamId
  std::vector<cuda::Event> events_;      // of the operations that some other waits for
  std::vector<int> event_of_operation_;  // -1: nobody waits for it
};

}  // namespace minillm::shard
