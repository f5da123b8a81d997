#include "train/training_program.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/checked.h"
#include "cuda/check.h"
#include "kernels/accumulate.h"
#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/cross_entropy.h"
#include "kernels/reduction.h"
#include "model/parameters.h"

namespace minillm::train {
namespace {

using shard::KernelWork;
using shard::Operands;
using shard::Operation;
using shard::OpKind;
using shard::Purpose;

/// Layout of the pinned result, in floats.
enum Result : size_t { kLossSum, kValidCount, kNorm, kFactor, kGate, kResultFloats };

void copy(void* to, const void* from, int64_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  cuda::check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream));
}

kernels::AdamWOptions adamw_options(const config::Optimizer& optimizer) {
  return {.beta1 = optimizer.beta1,
          .beta2 = optimizer.beta2,
          .epsilon = optimizer.eps,
          .weight_decay = optimizer.weight_decay};
}

model::Recomputation recomputation(const config::Config& config, int deferred_blocks) {
  model::Recomputation result{.deferred_blocks = deferred_blocks};
  for (int64_t block = 0; block < config.model.n_layers; ++block)
    result.blocks.push_back(config.memory.recompute_of(block));
  return result;
}

}  // namespace

TrainingProgram::TrainingProgram(const config::Config& config, const shard::Layout& layout,
                                 int deferred_blocks, int shard)
    : config_(config),
      layout_(layout),
      shard_(shard),
      transformer_(config.model,
                   {.batch = config.train.micro_batch,
                    .sequence = config.train.seq_len,
                    .head_chunk = config.train.head_chunk,
                    .micro_batches = config.train.grad_accumulation},
                   config.precision.param, layout, recomputation(config, deferred_blocks)),
      buffers_(transformer_.buffers()) {
  const auto add = [&](const char* name, int64_t bytes, Purpose purpose) {
    buffers_.push_back({name, bytes, purpose});
    return static_cast<int>(buffers_.size()) - 1;
  };
  int64_t largest_shard = 0, elements = 0;
  for (const shard::UnitLayout& unit : layout_.units) {
    first_segment_.push_back(std::ssize(first_element_));
    for (const shard::Segment& segment : unit.segments) {
      largest_shard = std::max(largest_shard, segment.shard_elements);
      first_element_.push_back(elements);
      elements += segment.used_elements;
    }
  }
  first_segment_.push_back(std::ssize(first_element_));
  workspace_ = add("cublas workspace", cuda::BlasLt::workspace_bytes(), Purpose::kWorkspace);
  step_scalars_ = add("step scalars", sizeof(kernels::AdamWStep), Purpose::kInputs);
  loss_scratch_ =
      add("loss scratch", kernels::sum_scratch(config.train.grad_accumulation), Purpose::kScratch);
  norm_scratch_ = add("norm scratch", kernels::sum_scratch(largest_shard), Purpose::kScratch);
  partials_scratch_ = add("partials scratch", kernels::sum_scratch(first_segment_.back()), Purpose::kScratch);
}

shard::BufferUse TrainingProgram::uses(const Operation& operation) const {
  switch (operation.kind) {
    case OpKind::kUpload:
    case OpKind::kBegin:
      return transformer_.uses(operation);
    case OpKind::kForward:
    case OpKind::kHeadLoss:
    case OpKind::kRecompute:
    case OpKind::kBackward:
    case OpKind::kBackwardInput:
    case OpKind::kBackwardWeight: {
      shard::BufferUse use = transformer_.uses(operation);
      use.writes.push_back(workspace_);
      return use;
    }
    case OpKind::kSetStep:
      return {{}, {step_scalars_}};
    case OpKind::kUpdate:
      return {{step_scalars_}, {}};
    case OpKind::kSquareNorm:
      return {{}, {norm_scratch_}};
    case OpKind::kCollectLoss:
      return {{}, {loss_scratch_}};
    case OpKind::kCollectNorm:
      return {{}, {partials_scratch_}};
    default:
      return {};
  }
}

void TrainingProgram::compute(const Operation& operation, const Operands& operands, cudaStream_t stream) {
  switch (operation.kind) {
    case OpKind::kUpload:
      return upload(operands, stream);
    case OpKind::kSetStep:
      return set_step(operands, stream);
    case OpKind::kBegin:
      return begin(operands, stream);
    case OpKind::kForward:
    case OpKind::kHeadLoss:
    case OpKind::kRecompute:
    case OpKind::kBackward:
    case OpKind::kBackwardInput:
    case OpKind::kBackwardWeight:
      return transformer_.compute(operation, operands, blas(operands), stream);
    case OpKind::kCast:
      return cast(operation, operands, stream);
    case OpKind::kAccumulate:
      return accumulate(operation, operands, stream);
    case OpKind::kSquareNorm:
      return square_norm(operation, operands, stream);
    case OpKind::kCollectLoss:
      return collect_loss(operands, stream);
    case OpKind::kGate:
      return gate(operands, stream);
    case OpKind::kCollectNorm:
      return collect_norm(operands, stream);
    case OpKind::kClip:
      return clip(operands, stream);
    case OpKind::kUpdate:
      return update(operation, operands, stream);
    case OpKind::kReadBack:
      return read_back(operands, stream);
    default:
      throw InternalError("compute() called for '" + describe(operation, {}) + "', which is not its work");
  }
}

// --- the host's side --------------------------------------------------------------------------------------

int64_t TrainingProgram::step_tokens() const {
  return config_.train.grad_accumulation * config_.train.micro_batch * config_.train.seq_len;
}

TrainingProgram::Slot& TrainingProgram::slot(int64_t step) {
  if (!slots_) {
    slots_ = std::make_unique<std::array<Slot, 2>>();
    for (Slot& slot : *slots_) {
      slot.scalars = cuda::PinnedMemory(sizeof(kernels::AdamWStep));
      slot.inputs = cuda::PinnedMemory(2 * step_tokens() * static_cast<int64_t>(sizeof(int32_t)));
      slot.result = cuda::PinnedMemory(kResultFloats * sizeof(float));
    }
  }
  return (*slots_)[static_cast<size_t>(step % 2)];
}

std::span<int32_t> TrainingProgram::tokens(int64_t step) {
  return {reinterpret_cast<int32_t*>(slot(step).inputs.data()), static_cast<size_t>(step_tokens())};
}

std::span<int32_t> TrainingProgram::targets(int64_t step) {
  const std::span<int32_t> first = tokens(step);
  return {first.data() + first.size(), first.size()};
}

void TrainingProgram::begin_step(int64_t step) {
  step_ = step;
  const kernels::AdamWStep scalars =
      kernels::adamw_step(adamw_options(config_.train.optimizer), config_.train.optimizer.lr, step + 1);
  std::memcpy(slot(step).scalars.data(), &scalars, sizeof(scalars));
}

StepResult TrainingProgram::result(int64_t step) const {
  slot(step).done.synchronize();
  const auto* result = reinterpret_cast<const float*>(slot(step).result.data());
  const double valid = result[kValidCount];
  const float factor = config_.train.grad_clip > 0 ? result[kFactor] : result[kGate];
  return {.loss = result[kLossSum] / std::max(valid, 1.0),
          .gradient_norm = result[kNorm],
          .valid_targets = static_cast<int64_t>(valid),
          .skipped = !std::isfinite(factor)};
}

// --- operations -------------------------------------------------------------------------------------------

// The workspace has its address only once the plan is made, so the handle is made at the first use.
cuda::BlasLt& TrainingProgram::blas(const Operands& operands) {
  if (!blas_) blas_ = std::make_unique<cuda::BlasLt>(operands.buffers[workspace_], config_.gemm.sm_limit);
  return *blas_;
}

float* TrainingProgram::scratch(const Operands& operands, int buffer) const {
  return reinterpret_cast<float*>(operands.buffers[buffer]);
}

template <class Visit>
void TrainingProgram::for_each_segment(const Operation& operation, Visit visit) const {
  const auto& unit = layout_.units[static_cast<size_t>(operation.unit)];
  int64_t number = first_segment_[static_cast<size_t>(operation.unit)] + std::max(operation.segment, 0);
  for (const shard::Segment& segment : segments_of(unit, operation.segment)) {
    visit(NumberedSegment{segment, number, first_element_[static_cast<size_t>(number)]});
    ++number;
  }
}

void TrainingProgram::upload(const Operands& operands, cudaStream_t stream) {
  const auto to_device = [&](int buffer, std::span<const int32_t> values) {
    copy(operands.buffers[buffer], values.data(), std::ssize(std::as_bytes(values)), cudaMemcpyHostToDevice,
         stream);
  };
  to_device(transformer_.tokens(), tokens(step_));
  to_device(transformer_.targets(), targets(step_));
}

void TrainingProgram::set_step(const Operands& operands, cudaStream_t stream) {
  copy(operands.buffers[step_scalars_], slot(step_).scalars.data(), sizeof(kernels::AdamWStep),
       cudaMemcpyHostToDevice, stream);
}

void TrainingProgram::begin(const Operands& operands, cudaStream_t stream) const {
  kernels::count_valid_targets(operands.valid_count,
                               reinterpret_cast<const int32_t*>(operands.buffers[transformer_.targets()]),
                               step_tokens(), stream);
}

void TrainingProgram::cast(const Operation& operation, const Operands& operands, cudaStream_t stream) const {
  const DType type = config_.precision.reduce;
  for_each_segment(operation, [&](const NumberedSegment& s) {
    kernels::cast({.out = operands.wire + s.segment.offset * size_of(type),
                   .in = operands.gradients + s.segment.offset,
                   .count = s.segment.padded_elements,
                   .out_type = type,
                   .in_type = DType::kFp32},
                  stream);
  });
}

void TrainingProgram::accumulate(const Operation& operation, const Operands& operands,
                                 cudaStream_t stream) const {
  const DType type = config_.precision.reduce;
  for_each_segment(operation, [&](const NumberedSegment& s) {
    kernels::accumulate({.out = operands.gradient_shard + s.segment.shard_offset,
                         .in = operands.reduced_piece + s.segment.shard_offset * size_of(type),
                         .count = s.segment.shard_elements,
                         .in_type = type,
                         .accumulate = operation.accumulate},
                        stream);
  });
}

void TrainingProgram::square_norm(const Operation& operation, const Operands& operands,
                                  cudaStream_t stream) const {
  for_each_segment(operation, [&](const NumberedSegment& s) {
    kernels::sum({.out = operands.norm_partials + s.number,
                  .in = operands.gradient_shard + s.segment.shard_offset,
                  .scratch = scratch(operands, norm_scratch_),
                  .count = s.segment.shard_elements,
                  .square = true},
                 stream);
  });
}

void TrainingProgram::collect_loss(const Operands& operands, cudaStream_t stream) const {
  kernels::sum({.out = operands.loss_total,
                .in = operands.loss_sum,
                .scratch = scratch(operands, loss_scratch_),
                .count = config_.train.grad_accumulation,
                .square = false},
               stream);
  copy(operands.loss_total + 1, operands.valid_count, sizeof(float), cudaMemcpyDeviceToDevice, stream);
}

// Losses are not negative, so their sum stands where a sum of squares is asked for.
void TrainingProgram::gate(const Operands& operands, cudaStream_t stream) const {
  kernels::clip_factor(
      {.factor = operands.gate, .norm = operands.gate + 1, .sum_of_squares = operands.loss_total, .limit = 0},
      stream);
}

void TrainingProgram::collect_norm(const Operands& operands, cudaStream_t stream) const {
  kernels::sum({.out = operands.norm_total,
                .in = operands.norm_partials,
                .scratch = scratch(operands, partials_scratch_),
                .count = first_segment_.back(),
                .square = false},
               stream);
}

void TrainingProgram::clip(const Operands& operands, cudaStream_t stream) const {
  kernels::clip_factor({.factor = operands.clip + 1,
                        .norm = operands.clip,
                        .sum_of_squares = operands.norm_total,
                        .limit = static_cast<float>(config_.train.grad_clip)},
                       stream);
}

void TrainingProgram::update(const Operation& operation, const Operands& operands,
                             cudaStream_t stream) const {
  const DType moments = config_.precision.moments, parameter = config_.precision.param;
  for_each_segment(operation, [&](const NumberedSegment& s) {
    const int64_t offset = s.segment.shard_offset;
    kernels::adamw({.parameter = operands.parameter_shard + offset * size_of(parameter),
                    .lower_half = operands.lower_half != nullptr ? operands.lower_half + offset : nullptr,
                    .moment1 = operands.moment1 + offset * size_of(moments),
                    .moment2 = operands.moment2 + offset * size_of(moments),
                    .gradient = operands.gradient_shard + offset,
                    .gradient_scale = operands.gate != nullptr ? operands.gate : operands.clip + 1,
                    .step = reinterpret_cast<const kernels::AdamWStep*>(operands.buffers[step_scalars_]),
                    .count = s.segment.shard_elements,
                    .options = adamw_options(config_.train.optimizer),
                    .moment_type = moments,
                    .seed = static_cast<uint64_t>(config_.train.seed),
                    .first_element = s.first_element + shard_ * s.segment.shard_elements},
                   stream);
  });
}

void TrainingProgram::read_back(const Operands& operands, cudaStream_t stream) {
  auto* result = reinterpret_cast<float*>(slot(step_).result.data());
  const auto to_host = [&](Result at, const float* from, int64_t count) {
    copy(result + at, from, count * static_cast<int64_t>(sizeof(float)), cudaMemcpyDeviceToHost, stream);
  };
  to_host(kLossSum, operands.loss_total, 2);
  to_host(kNorm, operands.clip, 2);
  if (operands.gate != nullptr) to_host(kGate, operands.gate, 1);
  slot(step_).done.record(stream);
}

// --- work -------------------------------------------------------------------------------------------------

std::vector<KernelWork> TrainingProgram::work(const Operation& operation) const {
  std::vector<KernelWork> list;
  const auto add = [&](const Cost& cost) { list.push_back({KernelWork::Unit::kOther, cost}); };
  const auto per_segment = [&](auto cost) {
    for_each_segment(operation, [&](const NumberedSegment& s) { add(cost(s.segment)); });
  };
  switch (operation.kind) {
    case OpKind::kUpload:
    case OpKind::kSetStep:
    case OpKind::kReadBack:
      return {};  // of the host's bus, and small
    case OpKind::kBegin:
      add({.bytes = 4 * step_tokens()});
      return list;
    case OpKind::kCast:
      per_segment([&](const shard::Segment& s) {
        return kernels::cast_cost({.count = s.padded_elements, .out_type = config_.precision.reduce});
      });
      return list;
    case OpKind::kAccumulate:
      per_segment([&](const shard::Segment& s) {
        return kernels::accumulate_cost({.count = s.shard_elements,
                                         .in_type = config_.precision.reduce,
                                         .accumulate = operation.accumulate});
      });
      return list;
    case OpKind::kSquareNorm:
      per_segment([&](const shard::Segment& s) { return kernels::sum_cost(s.shard_elements); });
      return list;
    case OpKind::kUpdate:
      per_segment([&](const shard::Segment& s) {
        return kernels::adamw_cost(s.shard_elements, config_.precision.moments);
      });
      return list;
    case OpKind::kCollectLoss:
    case OpKind::kGate:
    case OpKind::kCollectNorm:
    case OpKind::kClip:
      add({.bytes = 8});
      return list;
    default:
      return transformer_.work(operation);
  }
}

}  // namespace minillm::train
