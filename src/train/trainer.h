// A training run on one rank, assembled: the plan of a step, the arena, communicators and the executor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/arena.h"
#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/watchdog.h"
#include "config/config.h"
#include "cuda/stream.h"
#include "shard/executor.h"
#include "train/step_plan.h"

namespace minillm::train {

/// What a rank holds of a parameter.
enum class ShardKind : uint8_t { kMaster, kGradient, kMoment1, kMoment2 };

/// Changes the derived waits before they are used: how tests plant a missing one.
using WaitEdit = std::function<void(const shard::Schedule&, std::vector<std::vector<shard::Wait>>&)>;

struct TrainerOptions {
  WaitEdit edit_waits = {};
  bool keep_gradients = false;              ///< for read_shard(ShardKind::kGradient, …)
  std::optional<int> deferred_blocks = {};  ///< default: chosen by the plan
  comm::Watchdog* watchdog = nullptr;       ///< told of start-up's phases and of communicators; outlives all
};

class Trainer {
 public:
  /// Plans, allocates, chooses the products' algorithms (printed on rank 0, unless gemm.deterministic) and
  /// fills the initial values. Collective over the ranks of `bootstrap`, which outlives this. The policy is
  /// not "auto". Throws MemoryError with the table, the largest micro-batch that fits and the cheapest
  /// settings that would, before anything is allocated, when the plan exceeds memory.limit or what
  /// memory.reserve leaves of the device's free memory, and again when communicators took so much more than
  /// the reserve that it no longer fits; InputError for model.init files that do not fit the model;
  /// UsageError for a policy that does not fit the number of ranks. With communicators made, an error ends
  /// the job: see comm::end_job().
  Trainer(const config::Config& config, comm::Bootstrap& bootstrap, const TrainerOptions& options = {});
  ~Trainer();

  /// Where the inputs of step `step` go before enqueue(step).
  std::span<int32_t> tokens(int64_t step) { return program().tokens(step); }
  std::span<int32_t> targets(int64_t step) { return program().targets(step); }

  /// Enqueues a step; steps are enqueued in order, from 0. At most two may be without result().
  void enqueue(int64_t step);
  /// Blocks until step `step` is done.
  StepResult result(int64_t step) { return program().result(step); }

  /// Copies this rank's shard of a unit to the host, after all enqueued steps:
  /// layout().units[unit].shard_elements values. Gradients are those of the last step, unclipped, and need
  /// TrainerOptions::keep_gradients.
  std::vector<float> read_shard(ShardKind kind, int unit);
  void read_shard(ShardKind kind, int unit, std::span<float> values);

  const shard::Layout& layout() const { return *plan_.layout; }
  const shard::Schedule& schedule() const { return plan_.schedule; }
  const shard::MemoryPlan& memory() const { return plan_.memory; }
  const StepPlan& plan() const { return plan_; }
  /// Those that exist: of gathers, of reductions, of replicas.
  std::vector<const comm::Communicator*> communicators() const;
  int rank() const { return rank_; }

 private:
  TrainingProgram& program() const { return *plan_.program; }
  int shard() const { return rank_ % plan_.division.shards; }
  void assemble(comm::Bootstrap& bootstrap, const WaitEdit& edit_waits);
  void make_communicators(comm::Bootstrap& bootstrap);
  void progress();
  void choose_algorithms(comm::Bootstrap& bootstrap);
  void fill_initial_values();
  void fill_from_file(const cuda::Stream& stream);
  /// Of what lies at shard_address: of masters beside bf16 parameters, their upper halves.
  DType type_of(ShardKind kind) const;
  std::byte* shard_address(ShardKind kind, int unit) const;
  float* masters_in_fp32(int unit) const;
  void zero_moments(int unit, const cuda::Stream& stream);

  int rank_;
  StepPlan plan_;
  comm::Watchdog* watchdog_;
  std::unique_ptr<comm::Communicator> gather_, reduce_, replicate_;
  std::vector<comm::Watch> watches_;  // die before the communicators
  comm::Arena arena_;                 // dies before the communicators
  std::unique_ptr<shard::Executor> executor_;
};

}  // namespace minillm::train
