// A training run on one rank, assembled: layout, schedule, plan, the arena, communicators and the executor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "config/config.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "shard/executor.h"
#include "shard/layout.h"
#include "shard/memory_plan.h"
#include "shard/schedule.h"
#include "shard/waits.h"
#include "train/training_program.h"

namespace minillm::train {

/// What a rank holds of a parameter.
enum class ShardKind : uint8_t { kMaster, kGradient, kMoment1, kMoment2 };

/// Changes the derived waits before they are used: how tests plant a missing one.
using WaitEdit = std::function<void(const shard::Schedule&, std::vector<std::vector<shard::Wait>>&)>;

/// `config` with train.head_chunk chosen, if it leaves that to the memory plan: 1024 rows, or as many more as
/// need no more memory than those.
config::Config with_head_chunk(config::Config config, const shard::Layout& layout);

class Trainer {
 public:
  /// Plans, allocates, chooses the products' algorithms (printed on rank 0, unless gemm.deterministic) and
  /// fills the initial values. Collective over the ranks of `bootstrap`, which outlives this. Throws
  /// MemoryError with the table and the largest micro-batch that fits, before anything is allocated, when the
  /// plan exceeds the device's free memory; InputError for model.init files that do not fit the model.
  Trainer(const config::Config& config, comm::Bootstrap& bootstrap, const WaitEdit& edit_waits = {});
  ~Trainer();

  /// Where the inputs of step `step` go before enqueue(step).
  std::span<int32_t> tokens(int64_t step) { return program_.tokens(step); }
  std::span<int32_t> targets(int64_t step) { return program_.targets(step); }

  /// Enqueues a step; steps are enqueued in order, from 0. At most two may be without result().
  void enqueue(int64_t step);
  /// Blocks until step `step` is done.
  StepResult result(int64_t step) { return program_.result(step); }

  /// Copies this rank's shard of a unit to the host, after all enqueued steps:
  /// layout().units[unit].shard_elements values. Gradients are those of the last step, unclipped.
  std::vector<float> read_shard(ShardKind kind, int unit);

  const shard::Layout& layout() const { return layout_; }
  const shard::Schedule& schedule() const { return schedule_; }
  const shard::MemoryPlan& plan() const { return plan_; }
  std::vector<const comm::Communicator*> communicators() const;
  int rank() const { return rank_; }

 private:
  void check_capacity(const config::Config& config) const;
  void choose_algorithms(const config::Config& config, comm::Bootstrap& bootstrap);
  void fill_initial_values(const config::Config& config);
  void fill_from_file(const config::Config& config, const cuda::Stream& stream);
  DType type_of(ShardKind kind) const;
  std::byte* shard_address(ShardKind kind, int unit) const;
  float* master(int unit) const;

  int rank_;
  shard::Layout layout_;
  TrainingProgram program_;
  shard::Schedule schedule_;
  shard::MemoryPlan plan_;
  DType moment_type_;
  std::unique_ptr<comm::Communicator> gather_, reduce_;
  cuda::DeviceMemory arena_;
  std::unique_ptr<shard::Executor> executor_;
};

}  // namespace minillm::train
