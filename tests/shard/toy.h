// A model of small integers: every operation does real arithmetic on all of each region that it declares, in
// numbers for which sums are exact in any order, those of gradients in bf16 too. So an executed step equals
// the plain loops of toy_reference in every bit, or an operation ran at the wrong time or place.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

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

/// What kReadBack copies to the host: loss, number of valid targets, norm, clip factor, gate (0 when
/// clipped).
using ToyRecord = std::array<float, 5>;

struct ToyResult {
  std::vector<ToyRecord> history;             // by step
  std::vector<std::vector<float>> masters;    // by unit: this rank's shard
  std::vector<std::vector<float>> gradients;  // likewise of the last step, with Policy::keep_gradients
  friend bool operator==(const ToyResult&, const ToyResult&) = default;
};

// The arithmetic, shared by the kernels and the reference. constexpr, so that both host and device may call
// it.
constexpr float modulo(float x, int64_t divisor) {
  return static_cast<float>(static_cast<int64_t>(x) % divisor);
}
constexpr float wrap(float x) {
  return modulo(x, 61);
}
constexpr float toy_token(int step, int rank, int micro_batch, int64_t i) {
  return wrap(static_cast<float>(step * 7 + rank * 13 + micro_batch * 17 + i * i));
}
constexpr float toy_valid(float token) {
  return modulo(token, 3) == 0 ? 0 : 1;
}
constexpr float toy_scalar(int step) {
  return wrap(static_cast<float>(step * 5 + 1));
}
constexpr float toy_initial(int unit, int64_t element) {
  return wrap(static_cast<float>(unit * 11 + element % 4093));
}
constexpr float toy_weighted(float weight, int64_t element) {
  return weight * static_cast<float>(1 + element % 3);
}
constexpr float toy_forward(float in, float kept) {
  return wrap(3 * in + kept);
}
constexpr float toy_head(float in, float seen, float valid) {
  return wrap(in + seen + valid);
}
constexpr float toy_backward(float flow, float out, float kept, float seen) {
  return wrap(2 * wrap(flow + out + kept) + seen);
}
constexpr float toy_head_backward(float logit, float seen) {
  return wrap(2 * logit + seen);
}
/// At most 18, so that the sum of 14 of them is exact in bf16.
constexpr float toy_gradient(float flow, float in, float weight) {
  return modulo(flow + 2 * in + weight, 19);
}
constexpr float toy_gate(float loss, float valid, float scalar) {
  return 1 + wrap(loss + valid + scalar);
}
constexpr float toy_clip(float norm) {
  return 1 + wrap(2 * norm);
}
/// An element and its moments after an update. Padding, which is zero in all, stays zero.
constexpr std::array<float, 3> toy_update(float master, float moment1, float moment2, float gradient,
                                          float factor, float scalar) {
  const float first = wrap(moment1 + gradient), second = wrap(moment2 + gradient * scalar);
  return {wrap(master + gradient * factor + first + 2 * second), first, second};
}

class ToyProgram : public Program {
 public:
  ToyProgram(const Layout& layout, const Policy& policy, int rank, DType parameter_type, int steps);

  const std::vector<BufferSpec>& buffers() const override { return buffers_; }
  BufferUse uses(const Operation& operation) const override;
  void compute(const Operation& operation, const Operands& operands, cudaStream_t stream) override;
  std::vector<KernelWork> work(const Operation&) const override { return {}; }

  /// Of the steps that were read back, after Executor::synchronize().
  std::vector<ToyRecord> history() const;

 private:
  // Buffers: by unit what flows forward, what its passes keep and the gradient that deferred ones keep.
  int head() const { return static_cast<int>(layout_.units.size()) - 1; }
  int activation(int unit) const { return unit; }
  int kept(int unit) const { return head() + unit; }
  int saved_flow(int unit) const { return 2 * head() + unit; }
  int flow() const { return 3 * head(); }
  int tokens() const { return flow() + 1; }
  int scalar() const { return flow() + 2; }
  int logits() const { return flow() + 3; }
  int input(int unit) const { return unit == 0 ? tokens() : activation(unit - 1); }
  bool recomputes(int unit) const { return !policy_.recompute.empty() && policy_.recompute[unit]; }

  float* input_of(const Operation& operation, const Operands& operands) const;
  int64_t partial_of(int unit, int segment) const;  // place in Operands::norm_partials
  void begin(const Operation& operation, const Operands& operands, cudaStream_t stream);
  void forward(const Operation& operation, const Operands& operands, cudaStream_t stream) const;
  void head_loss(const Operation& operation, const Operands& operands, cudaStream_t stream) const;
  void head_backward(const Operation& operation, const Operands& operands, cudaStream_t stream) const;
  void backward(const Operation& operation, const Operands& operands, cudaStream_t stream) const;
  void make_gradients(const Operation& operation, const Operands& operands, const float* flows,
                      cudaStream_t stream) const;
  void reduce(const Operation& operation, const Operands& operands, cudaStream_t stream) const;
  void sum_scalars(const Operation& operation, const Operands& operands, cudaStream_t stream) const;
  void update(const Operation& operation, const Operands& operands, cudaStream_t stream) const;
  void read_back(const Operands& operands, cudaStream_t stream);

  const Layout& layout_;
  const Policy& policy_;
  int rank_ = 0;
  DType type_;
  int steps_begun_ = 0, scalars_set_ = 0, steps_read_ = 0;
  std::vector<BufferSpec> buffers_;
  cuda::PinnedMemory history_;
};

/// Ranks are numbered replica by replica.
struct ToyRun {
  Policy policy;
  DType type = DType::kBf16;
  int steps = 3;
  int rank = 0;
  Communicators communicators;
  Launch launch = Launch::kEager;
  int restart_at = -1;  ///< step before which parameters and moments are made what they were in the beginning
  Executor::Observer observer = {};
  std::function<void(int step)> before_step = {};
};

/// Builds the step and runs it, all steps enqueued before the host waits. `waits` replaces the derived
/// ones.
ToyResult run_toy(const Layout& layout, const ToyRun& run,
                  const std::vector<std::vector<Wait>>* waits = nullptr);

/// The same by loops over all ranks and micro-batches, without shards, slots, streams or a plan: of the
/// policy it reads replicas, micro-batches, clip and keep_gradients. The result of `rank`.
ToyResult toy_reference(const Layout& layout, const Policy& policy, int rank, int steps, int restart_at = -1);

}  // namespace minillm::shard
