// What one operation of a training step does on this rank: the transformer's passes, the optimizer, inputs
// and results.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "config/config.h"
#include "cuda/gemm.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "model/transformer.h"
#include "shard/layout.h"
#include "shard/program.h"

namespace minillm::train {

/// What a step tells the host. Sums are over all ranks.
struct StepResult {
  double loss = 0;           ///< mean over the valid targets
  double gradient_norm = 0;  ///< before clipping
  int64_t valid_targets = 0;
  bool skipped = false;  ///< the norm was not finite: nothing was updated
};

class TrainingProgram : public shard::Program {
 public:
  /// `layout` outlives this object. `rank`: whose shards it updates; plans do not depend on it.
  TrainingProgram(const config::Config& config, const shard::Layout& layout, int rank = 0);

  const std::vector<shard::BufferSpec>& buffers() const override { return buffers_; }
  shard::BufferUse uses(shard::OpKind kind, int unit) const override;
  void compute(const shard::Operation& operation, const shard::Operands& operands,
               cudaStream_t stream) override;

  /// Where the host writes the inputs of step `step` before it is enqueued: [micro_batch · seq_len] each. Two
  /// steps have places of their own, so the result of step - 2 must have been read first.
  std::span<int32_t> tokens(int64_t step);
  std::span<int32_t> targets(int64_t step);

  /// Sets which step the next compute() calls belong to (inputs, bias correction, where results go).
  void begin_step(int64_t step) { step_ = step; }
  /// Blocks until step `step` (one of the last two enqueued) is done.
  StepResult result(int64_t step) const;

  const model::Transformer& transformer() const { return transformer_; }
  /// Knows the shapes of all products once a step has been enqueued, which also makes it.
  cuda::BlasLt& blas() { return *blas_; }

 private:
  struct Slot {  // pinned memory of a step in flight
    cuda::PinnedMemory inputs, result;
    cuda::Event done;
  };
  const Slot& slot(int64_t step) const { return slots_[static_cast<size_t>(step % 2)]; }
  cuda::BlasLt& blas(const shard::Operands& operands);
  void begin(const shard::Operands& operands, cudaStream_t stream);
  void square_norm(int unit, const shard::Operands& operands, cudaStream_t stream) const;
  void collect_stats(const shard::Operands& operands, cudaStream_t stream) const;
  void clip(const shard::Operands& operands, cudaStream_t stream) const;
  void update(int unit, const shard::Operands& operands, cudaStream_t stream) const;
  void read_back(const shard::Operands& operands, cudaStream_t stream);

  const config::Config config_;
  const shard::Layout& layout_;
  const int rank_;
  std::vector<int64_t> first_element_;  // by unit: where it lies in the model, whatever the world size
  model::Transformer transformer_;
  std::vector<shard::BufferSpec> buffers_;  // the transformer's, then the three below
  int workspace_ = -1, norm_scratch_ = -1, stats_scratch_ = -1;
  std::unique_ptr<cuda::BlasLt> blas_;
  std::array<Slot, 2> slots_;
  int64_t step_ = 0;
};

}  // namespace minillm::train
