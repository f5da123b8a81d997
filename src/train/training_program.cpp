#include "train/training_program.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"
#include "cuda/check.h"
#include "kernels/adamw.h"
#include "kernels/cross_entropy.h"
#include "kernels/reduction.h"

namespace minillm::train {
namespace {

using shard::Operands;
using shard::OpKind;
using shard::Purpose;

/// Layout of the pinned result, in floats.
enum Result : size_t { kLossSum, kSumOfSquares, kNorm, kFactor, kValidCount, kResultFloats };

void copy_to_host(float* host, const float* device, int64_t count, cudaStream_t stream) {
  cuda::check(cudaMemcpyAsync(host, device, static_cast<size_t>(count) * sizeof(float),
                              cudaMemcpyDeviceToHost, stream));
}

}  // namespace

TrainingProgram::TrainingProgram(const config::Config& config, const shard::Layout& layout, int rank)
    : config_(config),
      layout_(layout),
      rank_(rank),
      transformer_(config.model,
                   {.batch = config.train.micro_batch,
                    .sequence = config.train.seq_len,
                    .head_chunk = config.train.head_chunk},
                   config.precision.param, layout),
      buffers_(transformer_.buffers()) {
  const auto add = [&](const char* name, int64_t bytes, Purpose purpose) {
    buffers_.push_back({name, bytes, purpose});
    return static_cast<int>(buffers_.size()) - 1;
  };
  int64_t largest_shard = 0, elements = 0;
  for (const shard::UnitLayout& unit : layout_.units) {
    largest_shard = std::max(largest_shard, unit.shard_elements);
    first_element_.push_back(elements);
    elements += unit.used_elements;
  }
  workspace_ = add("cublas workspace", cuda::BlasLt::workspace_bytes(), Purpose::kWorkspace);
  norm_scratch_ = add("norm scratch", kernels::sum_scratch(largest_shard), Purpose::kScratch);
  stats_scratch_ = add("stats scratch", kernels::sum_scratch(static_cast<int64_t>(layout_.units.size())),
                       Purpose::kScratch);
  const int64_t tokens = config.train.micro_batch * config.train.seq_len;
  for (Slot& slot : slots_) {
    slot.inputs = cuda::PinnedMemory(2 * tokens * static_cast<int64_t>(sizeof(int32_t)));
    slot.result = cuda::PinnedMemory(kResultFloats * sizeof(float));
  }
}

shard::BufferUse TrainingProgram::uses(OpKind kind, int unit) const {
  switch (kind) {
    case OpKind::kBegin:
      return transformer_.uses(kind, unit);
    case OpKind::kForward:
    case OpKind::kHeadLoss:
    case OpKind::kBackward: {
      shard::BufferUse use = transformer_.uses(kind, unit);
      use.writes.push_back(workspace_);
      return use;
    }
    case OpKind::kSquareNorm:
      return {{}, {norm_scratch_}};
    case OpKind::kCollectStats:
      return {{}, {stats_scratch_}};
    default:
      return {};
  }
}

void TrainingProgram::compute(const shard::Operation& operation, const Operands& operands,
                              cudaStream_t stream) {
  const int unit = operation.unit;
  switch (operation.kind) {
    case OpKind::kBegin:
      return begin(operands, stream);
    case OpKind::kForward:
      return transformer_.forward(unit, operands, blas(operands), stream);
    case OpKind::kHeadLoss:
      return transformer_.head_loss(operands, blas(operands), stream);
    case OpKind::kBackward:
      return transformer_.backward(unit, operands, blas(operands), stream);
    case OpKind::kSquareNorm:
      return square_norm(unit, operands, stream);
    case OpKind::kCollectStats:
      return collect_stats(operands, stream);
    case OpKind::kClip:
      return clip(operands, stream);
    case OpKind::kUpdate:
      return update(unit, operands, stream);
    case OpKind::kReadBack:
      return read_back(operands, stream);
    default:
      throw InternalError("compute() called for a collective: " + describe(operation, {}));
  }
}

// The workspace has its address only once the plan is made, so the handle is made at the first use.
cuda::BlasLt& TrainingProgram::blas(const Operands& operands) {
  if (!blas_) blas_ = std::make_unique<cuda::BlasLt>(operands.buffers[workspace_], config_.gemm.sm_limit);
  return *blas_;
}

std::span<int32_t> TrainingProgram::tokens(int64_t step) {
  const auto count = static_cast<size_t>(config_.train.micro_batch * config_.train.seq_len);
  return {reinterpret_cast<int32_t*>(slot(step).inputs.data()), count};
}

std::span<int32_t> TrainingProgram::targets(int64_t step) {
  const std::span<int32_t> first = tokens(step);
  return {first.data() + first.size(), first.size()};
}

void TrainingProgram::begin(const Operands& operands, cudaStream_t stream) {
  const auto upload = [&](int buffer, std::span<const int32_t> values) {
    cuda::check(cudaMemcpyAsync(operands.buffers[buffer], values.data(), values.size_bytes(),
                                cudaMemcpyHostToDevice, stream));
  };
  upload(transformer_.tokens(), tokens(step_));
  upload(transformer_.targets(), targets(step_));
  const auto* targets_on_device = reinterpret_cast<const int32_t*>(operands.buffers[transformer_.targets()]);
  kernels::count_valid_targets(operands.valid_count, targets_on_device, std::ssize(targets(step_)), stream);
}

void TrainingProgram::square_norm(int unit, const Operands& operands, cudaStream_t stream) const {
  kernels::sum({.out = operands.norm_partials + unit,
                .in = operands.gradient_shard,
                .scratch = reinterpret_cast<float*>(operands.buffers[norm_scratch_]),
                .count = layout_.units[static_cast<size_t>(unit)].shard_elements,
                .square = true},
               stream);
}

void TrainingProgram::collect_stats(const Operands& operands, cudaStream_t stream) const {
  cuda::check(
      cudaMemcpyAsync(operands.stats, operands.loss_sum, sizeof(float), cudaMemcpyDeviceToDevice, stream));
  kernels::sum({.out = operands.stats + 1,
                .in = operands.norm_partials,
                .scratch = reinterpret_cast<float*>(operands.buffers[stats_scratch_]),
                .count = std::ssize(layout_.units),
                .square = false},
               stream);
}

void TrainingProgram::clip(const Operands& operands, cudaStream_t stream) const {
  kernels::clip_factor({.factor = operands.clip + 1,
                        .norm = operands.clip,
                        .sum_of_squares = operands.stats + 1,
                        .limit = static_cast<float>(config_.train.grad_clip)},
                       stream);
}

void TrainingProgram::update(int unit, const Operands& operands, cudaStream_t stream) const {
  const config::Optimizer& optimizer = config_.train.optimizer;
  const int64_t count = layout_.units[static_cast<size_t>(unit)].shard_elements;
  const bool copy = config_.precision.param != DType::kFp32;  // else the master is what gathers read
  kernels::adamw({.master = operands.master,
                  .moment1 = operands.moment1,
                  .moment2 = operands.moment2,
                  .parameter = copy ? operands.parameter_shard : nullptr,
                  .gradient = operands.gradient_shard,
                  .gradient_scale = operands.clip + 1,
                  .count = count,
                  .learning_rate = optimizer.lr,
                  .beta1 = optimizer.beta1,
                  .beta2 = optimizer.beta2,
                  .epsilon = optimizer.eps,
                  .weight_decay = optimizer.weight_decay,
                  .step = step_ + 1,
                  .moment_type = config_.precision.moments,
                  .seed = static_cast<uint64_t>(config_.train.seed),
                  .first_element = first_element_[static_cast<size_t>(unit)] + rank_ * count},
                 stream);
}

void TrainingProgram::read_back(const Operands& operands, cudaStream_t stream) {
  auto* result = reinterpret_cast<float*>(slot(step_).result.data());
  copy_to_host(result + kLossSum, operands.stats, 2, stream);
  copy_to_host(result + kNorm, operands.clip, 2, stream);
  copy_to_host(result + kValidCount, operands.valid_count, 1, stream);
  slot(step_).done.record(stream);
}

StepResult TrainingProgram::result(int64_t step) const {
  slot(step).done.synchronize();
  const auto* result = reinterpret_cast<const float*>(slot(step).result.data());
  const double valid = result[kValidCount];
  return {.loss = result[kLossSum] / std::max(valid, 1.0),
          .gradient_norm = result[kNorm],
          .valid_targets = static_cast<int64_t>(valid),
          .skipped = !std::isfinite(result[kFactor])};
}

}  // namespace minillm::train
