// A model of small integers: every operation does real arithmetic on all of each region that it declares, in
// numbers for which fp32 sums are exact in any order. So an executed step equals the plain loops of
// toy_reference in every bit, or an operation ran at the wrong time or place.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "core/dtype.h"
#include "cuda/memory.h"
#include "shard/builder.h"
#include "shard/executor.h"
#include "shard/layout.h"
#include "shard/memory_plan.h"
#include "shard/program.h"
#include "shard/waits.h"

namespace minillm::shard {

inline constexpr int kToyWidth = 97;  // elements of an activation

/// What kReadBack copies to the host: loss, sum of squares, norm, clip factor, number of valid targets.
using ToyRecord = std::array<float, 5>;

struct ToyResult {
  std::vector<ToyRecord> history;           // by step
  std::vector<std::vector<float>> masters;  // by unit: this rank's shard
  friend bool operator==(const ToyResult&, const ToyResult&) = default;
};

// The arithmetic, shared by the kernels and the reference. constexpr, so that both host and device may call
// it.
constexpr float wrap(float x) {
  return static_cast<float>(static_cast<int64_t>(x) % 61);
}
constexpr float toy_token(int step, int rank, int64_t i) {
  return wrap(static_cast<float>(step * 7 + rank * 13 + i * i));
}
constexpr float toy_valid(int step, int rank) {
  return static_cast<float>(1 + (step + rank) % 3);
}
constexpr float toy_initial(int unit, int64_t element) {
  return wrap(static_cast<float>(unit * 11 + element % 4093));
}
constexpr float toy_weighted(float weight, int64_t element) {
  return weight * static_cast<float>(1 + element % 3);
}

class ToyProgram : public Program {
 public:
  ToyProgram(const Layout& layout, int rank, DType parameter_type, int steps);

  const std::vector<BufferSpec>& buffers() const override { return buffers_; }
  BufferUse uses(OpKind kind, int unit) const override;
  void compute(const Operation& operation, const Operands& operands, cudaStream_t stream) override;

  /// Writes initial values to the arena; returns when they are there.
  void initialize(std::byte* arena, const MemoryPlan& plan) const;
  /// The results so far, after Executor::synchronize().
  ToyResult result(const std::byte* arena, const MemoryPlan& plan) const;

 private:
  int head() const { return static_cast<int>(layout_.units.size()) - 1; }
  // Buffers: outputs of the units but the head, tokens, the gradient that flows backward, a scratch per unit.
  int activation(int unit) const { return unit; }
  int tokens() const { return head(); }
  int input(int unit) const { return unit == 0 ? tokens() : activation(unit - 1); }
  int flow() const { return head() + 1; }
  int scratch(int unit) const { return head() + 2 + unit; }
  void forward(int unit, const Operands& operands, cudaStream_t stream) const;
  void head_loss(const Operands& operands, cudaStream_t stream) const;
  void backward(int unit, const Operands& operands, cudaStream_t stream) const;
  void update(int unit, const Operands& operands, cudaStream_t stream) const;
  void read_back(const Operands& operands, cudaStream_t stream);

  const Layout& layout_;
  int rank_ = 0;
  DType type_;
  int step_ = -1;
  std::vector<BufferSpec> buffers_;
  cuda::PinnedMemory history_;
};

struct ToyRun {
  Policy policy;
  DType type = DType::kBf16;
  int steps = 3;
  int rank = 0;
  Communicators communicators;
};

/// Builds the step and runs it, all steps enqueued before the host waits. `waits` replaces the derived
/// ones.
ToyResult run_toy(const Layout& layout, const ToyRun& run,
                  const std::vector<std::vector<Wait>>* waits = nullptr);

/// The same by loops over all ranks, without shards, slots, streams or a plan. The result of `rank`.
ToyResult toy_reference(const Layout& layout, int rank, int steps);

}  // namespace minillm::shard
