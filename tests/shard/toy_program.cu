#include <cuda_bf16.h>

#include <cstring>

#include "core/checked.h"
#include "cuda/check.h"
#include "kernels/device/launch.h"
#include "toy.h"

namespace minillm::shard {
namespace {

using kernels::launch;
using kernels::LaunchShape;

constexpr int kThreads = 64;

LaunchShape over(int64_t elements, cudaStream_t stream) {
  return {dim3(static_cast<unsigned>(ceil_div(elements, kThreads))), dim3(kThreads), 0, stream};
}
LaunchShape single(cudaStream_t stream) {
  return {dim3(1), dim3(1), 0, stream};
}

__device__ int64_t element() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

struct Weights {
  const std::byte* data;
  int64_t elements;
  bool bf16;

  __device__ float at(int64_t i) const {
    return bf16 ? __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(data)[i])
                : reinterpret_cast<const float*>(data)[i];
  }
  // The part of the weights that lane `i` of an activation sees; all lanes together see all, padding
  // included.
  __device__ float seen_by(int64_t i) const {
    float sum = 0;
    for (int64_t j = i; j < elements; j += kToyWidth) sum += toy_weighted(at(j), j);
    return sum;
  }
};

__global__ void begin_kernel(float* tokens, float* valid, int step, int rank) {
  const int64_t i = element();
  if (i < kToyWidth) tokens[i] = toy_token(step, rank, i);
  if (i == 0) *valid = toy_valid(step, rank);
}

__global__ void forward_kernel(float* out, float* scratch, const float* in, Weights weights) {
  const int64_t i = element();
  if (i >= kToyWidth) return;
  scratch[i] = wrap(weights.seen_by(i));
  out[i] = wrap(3 * in[i] + scratch[i]);
}

__global__ void head_flow_kernel(float* flow, const float* in, const float* valid, Weights weights) {
  const int64_t i = element();
  if (i < kToyWidth) flow[i] = wrap(in[i] + weights.seen_by(i) + *valid);
}

__global__ void loss_kernel(float* loss, const float* flow) {
  float sum = 0;
  for (int64_t i = 0; i < kToyWidth; ++i) sum += flow[i];
  *loss = sum;
}

// One slice of a unit's gradients; padding is not written.
__global__ void gradient_kernel(float* gradients, int64_t begin, int64_t count, const float* flow,
                                const float* in, Weights weights) {
  const int64_t j = begin + element();
  if (j >= begin + count) return;
  const float weight = weights.data != nullptr ? weights.at(j) : 0;
  gradients[j] = wrap(flow[j % kToyWidth] + 2 * in[j % kToyWidth] + weight);
}

__global__ void flow_kernel(float* flow, float* scratch, const float* out, Weights weights) {
  const int64_t i = element();
  if (i >= kToyWidth) return;
  scratch[i] = wrap(flow[i] + out[i]);
  flow[i] = wrap(2 * scratch[i] + weights.seen_by(i));
}

__global__ void norm_kernel(float* partial, const float* gradients, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += gradients[i];
  *partial = sum;
}

__global__ void collect_kernel(float* stats, const float* loss, const float* partials, int units) {
  stats[0] = *loss;
  stats[1] = 0;
  for (int u = 0; u < units; ++u) stats[1] += partials[u];
}

__global__ void clip_kernel(float* clip, const float* stats) {
  clip[0] = wrap(stats[0] + stats[1]);
  clip[1] = 1 + wrap(stats[1]);
}

__global__ void update_kernel(Operands to, int64_t count, bool bf16) {
  const int64_t i = element();
  if (i >= count) return;
  float* const moment1 = reinterpret_cast<float*>(to.moment1);
  float* const moment2 = reinterpret_cast<float*>(to.moment2);
  moment1[i] = wrap(moment1[i] + to.gradient_shard[i]);
  moment2[i] = wrap(moment2[i] + to.gradient_shard[i] * to.clip[0]);
  const float master = wrap(to.master[i] + to.gradient_shard[i] * to.clip[1] + moment1[i] + 2 * moment2[i]);
  to.master[i] = master;
  if (bf16) reinterpret_cast<__nv_bfloat16*>(to.parameter_shard)[i] = __float2bfloat16(master);
}

float* floats(const Operands& operands, int buffer) {
  return reinterpret_cast<float*>(operands.buffers[buffer]);
}

}  // namespace

ToyProgram::ToyProgram(const Layout& layout, int rank, DType parameter_type, int steps)
    : layout_(layout),
      rank_(rank),
      type_(parameter_type),
      history_(static_cast<int64_t>(steps * sizeof(ToyRecord))) {
  const int64_t bytes = kToyWidth * sizeof(float);
  for (int u = 0; u < head(); ++u)
    buffers_.push_back({"activation " + std::to_string(u), bytes, Purpose::kActivations});
  buffers_.push_back({"tokens", bytes, Purpose::kInputs});
  buffers_.push_back({"flow", bytes, Purpose::kScratch});
  for (int u = 0; u < head(); ++u)
    buffers_.push_back({"scratch " + std::to_string(u), bytes, Purpose::kScratch});
}

BufferUse ToyProgram::uses(OpKind kind, int unit) const {
  switch (kind) {
    case OpKind::kBegin:
      return {{}, {tokens()}};
    case OpKind::kForward:
      return {{input(unit)}, {activation(unit), scratch(unit)}};
    case OpKind::kHeadLoss:
      return {{input(unit)}, {flow()}};
    case OpKind::kBackward:
      return {{input(unit), activation(unit), flow()}, {flow(), scratch(unit)}};
    default:
      return {};
  }
}

void ToyProgram::compute(const Operation& operation, const Operands& operands, cudaStream_t stream) {
  switch (operation.kind) {
    case OpKind::kBegin:
      ++step_;
      launch("begin", begin_kernel, over(kToyWidth, stream), floats(operands, tokens()), operands.valid_count,
             step_, rank_);
      return;
    case OpKind::kForward:
      return forward(operation.unit, operands, stream);
    case OpKind::kHeadLoss:
      return head_loss(operands, stream);
    case OpKind::kBackward:
      return backward(operation.unit, operands, stream);
    case OpKind::kSquareNorm:
      launch("norm", norm_kernel, single(stream), operands.norm_partials + operation.unit,
             operands.gradient_shard, layout_.units[operation.unit].shard_elements);
      return;
    case OpKind::kCollectStats:
      launch("collect", collect_kernel, single(stream), operands.stats, operands.loss_sum,
             operands.norm_partials, head() + 1);
      return;
    case OpKind::kClip:
      launch("clip", clip_kernel, single(stream), operands.clip, operands.stats);
      return;
    case OpKind::kUpdate:
      return update(operation.unit, operands, stream);
    case OpKind::kReadBack:
      return read_back(operands, stream);
    default:
      throw InternalError("ToyProgram: " + describe(operation, {}) + " is no computation");
  }
}

void ToyProgram::forward(int unit, const Operands& operands, cudaStream_t stream) const {
  const Weights weights{operands.weights, layout_.units[unit].padded_elements, type_ == DType::kBf16};
  launch("forward", forward_kernel, over(kToyWidth, stream), floats(operands, activation(unit)),
         floats(operands, scratch(unit)), floats(operands, input(unit)), weights);
}

void ToyProgram::head_loss(const Operands& operands, cudaStream_t stream) const {
  const UnitLayout& unit = layout_.units[head()];
  const Weights weights{operands.weights, unit.padded_elements, type_ == DType::kBf16};
  const float* in = floats(operands, input(head()));
  float* flow_buffer = floats(operands, flow());
  launch("head_flow", head_flow_kernel, over(kToyWidth, stream), flow_buffer, in, operands.valid_count,
         weights);
  launch("loss", loss_kernel, single(stream), operands.loss_sum, flow_buffer);
  for (const Slice& slice : unit.slices)
    launch("gradient", gradient_kernel, over(slice.elements, stream), operands.gradients, slice.offset,
           slice.elements, flow_buffer, in, weights);
}

void ToyProgram::backward(int unit_index, const Operands& operands, cudaStream_t stream) const {
  const UnitLayout& unit = layout_.units[unit_index];
  const Weights weights{operands.weights, unit.padded_elements, type_ == DType::kBf16};
  float* flow_buffer = floats(operands, flow());
  for (const Slice& slice : unit.slices)
    launch("gradient", gradient_kernel, over(slice.elements, stream), operands.gradients, slice.offset,
           slice.elements, flow_buffer, floats(operands, input(unit_index)), weights);
  if (unit_index == 0) return;
  launch("flow", flow_kernel, over(kToyWidth, stream), flow_buffer, floats(operands, scratch(unit_index)),
         floats(operands, activation(unit_index)), weights);
}

void ToyProgram::update(int unit, const Operands& operands, cudaStream_t stream) const {
  const int64_t count = layout_.units[unit].shard_elements;
  launch("update", update_kernel, over(count, stream), operands, count, type_ == DType::kBf16);
}

void ToyProgram::read_back(const Operands& operands, cudaStream_t stream) {
  float* record = reinterpret_cast<float*>(history_.data()) + step_ * std::tuple_size_v<ToyRecord>;
  const auto copy = [&](int at, const float* from, int count) {
    cuda::check(cudaMemcpyAsync(record + at, from, count * sizeof(float), cudaMemcpyDeviceToHost, stream));
  };
  copy(0, operands.stats, 2);
  copy(2, operands.clip, 2);
  copy(4, operands.valid_count, 1);
}

void ToyProgram::initialize(std::byte* arena, const MemoryPlan& plan) const {
  for (int u = 0; u <= head(); ++u) {
    const UnitLayout& unit = layout_.units[u];
    std::vector<float> master(static_cast<size_t>(unit.shard_elements));
    for (const Slice& slice : unit.slices) {
      const ShardPiece piece = shard_piece(unit, slice, rank_);
      for (int64_t i = 0; i < piece.count; ++i)
        master[static_cast<size_t>(piece.shard_offset + i)] =
            toy_initial(u, slice.offset + piece.tensor_offset + i);
    }
    const size_t bytes = master.size() * sizeof(float);
    cuda::check(cudaMemset(arena + plan.moment1[u], 0, bytes));
    cuda::check(cudaMemset(arena + plan.moment2[u], 0, bytes));
    cuda::check(cudaMemcpy(arena + plan.master[u], master.data(), bytes, cudaMemcpyHostToDevice));
    if (type_ == DType::kFp32) continue;
    std::vector<__nv_bfloat16> rounded;
    for (float value : master) rounded.push_back(__float2bfloat16(value));
    cuda::check(
        cudaMemcpy(arena + plan.parameter_shard[u], rounded.data(), bytes / 2, cudaMemcpyHostToDevice));
  }
  cuda::check(cudaDeviceSynchronize());
}

ToyResult ToyProgram::result(const std::byte* arena, const MemoryPlan& plan) const {
  ToyResult result;
  result.history.resize(static_cast<size_t>(step_ + 1));
  std::memcpy(result.history.data(), history_.data(), result.history.size() * sizeof(ToyRecord));
  for (int u = 0; u <= head(); ++u) {
    std::vector<float> master(static_cast<size_t>(layout_.units[u].shard_elements));
    cuda::check(cudaMemcpy(master.data(), arena + plan.master[u], master.size() * sizeof(float),
                           cudaMemcpyDeviceToHost));
    result.masters.push_back(std::move(master));
  }
  return result;
}

ToyResult run_toy(const Layout& layout, const ToyRun& run, const std::vector<std::vector<Wait>>* waits) {
  ToyProgram program(layout, run.rank, run.type, run.steps);
  const Schedule schedule = build_schedule(layout, program, run.policy);
  const MemoryPlan plan = plan_memory(schedule, layout, program, run.type);
  const cuda::DeviceMemory arena(plan.bytes);
  program.initialize(arena.data(), plan);
  Executor executor(schedule, layout, plan, waits != nullptr ? *waits : derive_waits(schedule), program,
                    run.communicators, arena.data(), run.type);
  for (int step = 0; step < run.steps; ++step) executor.step();
  executor.synchronize();
  return program.result(arena.data(), plan);
}

}  // namespace minillm::shard
