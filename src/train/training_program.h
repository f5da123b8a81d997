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
  bool skipped = false;  ///< the loss, or with clipping the norm, was not finite: nothing was updated
};

class TrainingProgram : public shard::Program {
 public:
  /// `layout` outlives this object. `deferred_blocks` as in shard::Policy. `shard`: the position of this rank
  /// among those that share a model; plans do not depend on it. Touches no device before it is run.
  TrainingProgram(const config::Config& config, const shard::Layout& layout, int deferred_blocks,
                  int shard = 0);

  const std::vector<shard::BufferSpec>& buffers() const override { return buffers_; }
  shard::BufferUse uses(const shard::Operation& operation) const override;
  void compute(const shard::Operation& operation, const shard::Operands& operands,
               cudaStream_t stream) override;
  std::vector<shard::KernelWork> work(const shard::Operation& operation) const override;

  /// Where the host writes the inputs of step `step` before it is enqueued:
  /// [grad_accumulation · micro_batch · seq_len] each. Two steps have places of their own, so the result of
  /// step - 2 must have been read first.
  std::span<int32_t> tokens(int64_t step);
  std::span<int32_t> targets(int64_t step);

  /// Sets which step the next compute() calls belong to (inputs, bias correction, where results go).
  void begin_step(int64_t step);
  /// Blocks until step `step` (one of the last two enqueued) is done.
  StepResult result(int64_t step) const;

  const model::Transformer& transformer() const { return transformer_; }
  /// Knows the shapes of all products once a step has been enqueued, which also makes it.
  cuda::BlasLt& blas() { return *blas_; }

 private:
  struct Slot {  // pinned memory of a step in flight
    cuda::PinnedMemory scalars, inputs, result;
    cuda::Event done;
  };
  Slot& slot(int64_t step);
  const Slot& slot(int64_t step) const { return (*slots_)[static_cast<size_t>(step % 2)]; }
  int64_t step_tokens() const;
  cuda::BlasLt& blas(const shard::Operands& operands);
  float* scratch(const shard::Operands& operands, int buffer) const;

  void upload(const shard::Operands& operands, cudaStream_t stream);
  void set_step(const shard::Operands& operands, cudaStream_t stream);
  void begin(const shard::Operands& operands, cudaStream_t stream) const;
  void cast(const shard::Operation& operation, const shard::Operands& operands, cudaStream_t stream) const;
  void accumulate(const shard::Operation& operation, const shard::Operands& operands,
                  cudaStream_t stream) const;
  void square_norm(const shard::Operation& operation, const shard::Operands& operands,
                   cudaStream_t stream) const;
  void collect_loss(const shard::Operands& operands, cudaStream_t stream) const;
  void gate(const shard::Operands& operands, cudaStream_t stream) const;
  void collect_norm(const shard::Operands& operands, cudaStream_t stream) const;
  void clip(const shard::Operands& operands, cudaStream_t stream) const;
  void update(const shard::Operation& operation, const shard::Operands& operands, cudaStream_t stream) const;
  void read_back(const shard::Operands& operands, cudaStream_t stream);

  /// A segment of a unit, and its number among all segments of all units.
  struct NumberedSegment {
    const shard::Segment& segment;
    int64_t number;
    int64_t first_element;  // where it lies in the model, whatever the world size
  };
  template <class Visit>
  void for_each_segment(const shard::Operation& operation, Visit visit) const;

  const config::Config config_;
  const shard::Layout& layout_;
  const int shard_;
  std::vector<int64_t> first_segment_;  // by unit: number of its first segment; then the number of segments
  std::vector<int64_t> first_element_;  // by segment
  model::Transformer transformer_;
  std::vector<shard::BufferSpec> buffers_;  // the transformer's, then those below
  int workspace_ = -1, step_scalars_ = -1, loss_scratch_ = -1, norm_scratch_ = -1, partials_scratch_ = -1;
  std::unique_ptr<cuda::BlasLt> blas_;
  std::unique_ptr<std::array<Slot, 2>> slots_;  // made at the first use
  int64_t step_ = 0;
};

}  // namespace minillm::train
