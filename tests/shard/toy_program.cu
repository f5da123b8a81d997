#include <cuda_bf16.h>

#include <cstring>

#include "core/checked.h"
#include "core/error.h"
#include "core/split_float.h"
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

__global__ void upload_kernel(float* tokens, int micro_batches, int step, int rank) {
  const int64_t i = element();
  if (i >= micro_batches * kToyWidth) return;
  tokens[i] = toy_token(step, rank, static_cast<int>(i / kToyWidth), i % kToyWidth);
}

__global__ void set_kernel(float* scalar, float value) {
  *scalar = value;
}

__global__ void begin_kernel(float* valid, const float* tokens, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += toy_valid(tokens[i]);
  *valid = sum;
}

// `out` is null where only `kept` is wanted, `kept` where it is not.
__global__ void forward_kernel(float* out, float* kept, const float* in, Weights weights) {
  const int64_t i = element();
  if (i >= kToyWidth) return;
  const float value = wrap(weights.seen_by(i));
  if (kept) kept[i] = value;
  if (out) out[i] = toy_forward(in[i], value);
}

__global__ void head_kernel(float* logits, const float* in, const float* valid, Weights weights) {
  const int64_t i = element();
  if (i < kToyWidth) logits[i] = toy_head(in[i], weights.seen_by(i), *valid);
}

__global__ void head_backward_kernel(float* flow, const float* logits, Weights weights) {
  const int64_t i = element();
  if (i < kToyWidth) flow[i] = toy_head_backward(logits[i], weights.seen_by(i));
}

__global__ void backward_kernel(float* flow, float* saved, const float* kept, const float* out,
                                Weights weights) {
  const int64_t i = element();
  if (i >= kToyWidth) return;
  if (saved) saved[i] = flow[i];
  flow[i] = toy_backward(flow[i], out[i], kept[i], weights.seen_by(i));
}

// One slice of a unit's gradients; padding is not written.
__global__ void gradient_kernel(float* gradients, int64_t begin, int64_t count, bool add, const float* flow,
                                const float* in, Weights weights) {
  const int64_t j = begin + element();
  if (j >= begin + count) return;
  const float weight = weights.data != nullptr ? weights.at(j) : 0;
  const float gradient = toy_gradient(flow[j % kToyWidth], in[j % kToyWidth], weight);
  gradients[j] = add ? gradients[j] + gradient : gradient;
}

__global__ void cast_kernel(__nv_bfloat16* wire, const float* gradients, int64_t count) {
  const int64_t i = element();
  if (i < count) wire[i] = __float2bfloat16(gradients[i]);
}

template <typename Piece>
__global__ void accumulate_kernel(float* shard, const Piece* piece, int64_t count, bool add) {
  const int64_t i = element();
  if (i < count) shard[i] = (add ? shard[i] : 0.0f) + static_cast<float>(piece[i]);
}

__global__ void sum_kernel(float* sum, const float* values, int64_t count) {
  float total = 0;
  for (int64_t i = 0; i < count; ++i) total += values[i];
  *sum = total;
}

__global__ void collect_loss_kernel(float* total, const float* sums, int micro_batches, const float* valid) {
  total[0] = 0;
  for (int m = 0; m < micro_batches; ++m) total[0] += sums[m];
  total[1] = *valid;
}

__global__ void gate_kernel(float* gate, const float* loss_total, const float* scalar) {
  gate[0] = toy_gate(loss_total[0], loss_total[1], *scalar);
}

__global__ void clip_kernel(float* clip, const float* norm_total) {
  clip[0] = wrap(*norm_total);
  clip[1] = toy_clip(*norm_total);
}

// The master weights: fp32, or in two halves where `lower` is not null.
struct ToyMasters {
  std::byte* parameters;
  uint16_t* lower;

  __device__ float load(int64_t i) const {
    if (!lower) return reinterpret_cast<const float*>(parameters)[i];
    return __uint_as_float(join_float({reinterpret_cast<const uint16_t*>(parameters)[i], lower[i]}));
  }
  __device__ void store(int64_t i, float value) const {
    if (!lower) {
      reinterpret_cast<float*>(parameters)[i] = value;
      return;
    }
    const SplitFloat halves = split_float(__float_as_uint(value));
    reinterpret_cast<uint16_t*>(parameters)[i] = halves.upper;
    lower[i] = halves.lower;
  }
};

__global__ void update_kernel(ToyMasters masters, float* moment1, float* moment2, const float* gradients,
                              int64_t count, const float* factor, const float* scalar) {
  const int64_t i = element();
  if (i >= count) return;
  const auto updated = toy_update(masters.load(i), moment1[i], moment2[i], gradients[i], *factor, *scalar);
  masters.store(i, updated[0]);
  moment1[i] = updated[1];
  moment2[i] = updated[2];
}

float* floats(const Operands& operands, int buffer) {
  return reinterpret_cast<float*>(operands.buffers[buffer]);
}
__nv_bfloat16* bf16s(std::byte* data) {
  return reinterpret_cast<__nv_bfloat16*>(data);
}

}  // namespace

ToyProgram::ToyProgram(const Layout& layout, const Policy& policy, int rank, DType parameter_type, int steps)
    : layout_(layout),
      policy_(policy),
      rank_(rank),
      type_(parameter_type),
      history_(static_cast<int64_t>(steps * sizeof(ToyRecord))) {
  std::memset(history_.data(), 0, static_cast<size_t>(history_.bytes()));
  const int64_t lanes = kToyWidth * sizeof(float);
  for (int kind = 0; kind < 3; ++kind)
    for (int unit = 0; unit < head(); ++unit)
      buffers_.push_back({"lanes " + std::to_string(kind) + " of " + layout.units[unit].name, lanes});
  buffers_.push_back({"flow", lanes});
  buffers_.push_back({"tokens", policy.micro_batches * lanes, Purpose::kInputs});
  buffers_.push_back({"scalar", sizeof(float), Purpose::kInputs});
  buffers_.push_back({"logits", lanes, Purpose::kScratch});
}

BufferUse ToyProgram::uses(const Operation& operation) const {
  const int unit = operation.unit;
  switch (operation.kind) {
    case OpKind::kUpload:
      return {{}, {tokens()}};
    case OpKind::kSetStep:
      return {{}, {scalar()}};
    case OpKind::kBegin:
      return {{tokens()}, {}};
    case OpKind::kForward:
      return recomputes(unit) ? BufferUse{{input(unit)}, {activation(unit)}}
                              : BufferUse{{input(unit)}, {activation(unit), kept(unit)}};
    case OpKind::kRecompute:
      return {{input(unit)}, {kept(unit)}};
    case OpKind::kHeadLoss:
      return operation.segment < 0 ? BufferUse{{input(unit)}, {logits(), flow()}}
                                   : BufferUse{{input(unit)}, {logits()}};
    case OpKind::kBackward:
      if (unit == 0) return {{tokens(), flow()}, {}};
      return {{input(unit), activation(unit), kept(unit), flow()}, {flow()}};
    case OpKind::kBackwardInput:
      if (unit == head())
        return operation.segment < 0 ? BufferUse{{logits()}, {flow()}}
                                     : BufferUse{{input(unit), logits()}, {flow()}};
      return {{input(unit), activation(unit), kept(unit), flow()}, {flow(), saved_flow(unit)}};
    case OpKind::kBackwardWeight:
      return {{input(unit), saved_flow(unit)}, {}};
    case OpKind::kGate:
    case OpKind::kUpdate:
      return {{scalar()}, {}};
    default:
      return {};
  }
}

void ToyProgram::compute(const Operation& operation, const Operands& operands, cudaStream_t stream) {
  switch (operation.kind) {
    case OpKind::kUpload:
    case OpKind::kSetStep:
    case OpKind::kBegin:
      return begin(operation, operands, stream);
    case OpKind::kForward:
    case OpKind::kRecompute:
      return forward(operation, operands, stream);
    case OpKind::kHeadLoss:
      return head_loss(operation, operands, stream);
    case OpKind::kBackward:
    case OpKind::kBackwardInput:
      return operation.unit == head() ? head_backward(operation, operands, stream)
                                      : backward(operation, operands, stream);
    case OpKind::kBackwardWeight:
      return make_gradients(operation, operands, floats(operands, saved_flow(operation.unit)), stream);
    case OpKind::kCast:
    case OpKind::kAccumulate:
    case OpKind::kSquareNorm:
      return reduce(operation, operands, stream);
    case OpKind::kCollectLoss:
    case OpKind::kGate:
    case OpKind::kCollectNorm:
    case OpKind::kClip:
      return sum_scalars(operation, operands, stream);
    case OpKind::kUpdate:
      return update(operation, operands, stream);
    case OpKind::kReadBack:
      return read_back(operands, stream);
    default:
      throw InternalError("ToyProgram: " + describe(operation, {}) + " is no computation");
  }
}

// The host's part of a step is counted by itself: a captured step is told nothing else.
void ToyProgram::begin(const Operation& operation, const Operands& operands, cudaStream_t stream) {
  const int64_t count = int64_t{policy_.micro_batches} * kToyWidth;
  if (operation.kind == OpKind::kUpload)
    launch("upload", upload_kernel, over(count, stream), floats(operands, tokens()), policy_.micro_batches,
           steps_begun_++, rank_);
  else if (operation.kind == OpKind::kSetStep)
    launch("set", set_kernel, single(stream), floats(operands, scalar()), toy_scalar(scalars_set_++));
  else
    launch("begin", begin_kernel, single(stream), operands.valid_count, floats(operands, tokens()), count);
}

void ToyProgram::forward(const Operation& operation, const Operands& operands, cudaStream_t stream) const {
  const int unit = operation.unit;
  const Weights weights{operands.weights, layout_.units[unit].padded_elements, type_ == DType::kBf16};
  const bool again = operation.kind == OpKind::kRecompute;
  float* const out = again ? nullptr : floats(operands, activation(unit));
  float* const keep = recomputes(unit) && !again ? nullptr : floats(operands, kept(unit));
  launch("forward", forward_kernel, over(kToyWidth, stream), out, keep, input_of(operation, operands),
         weights);
}

void ToyProgram::head_loss(const Operation& operation, const Operands& operands, cudaStream_t stream) const {
  const Weights weights{operands.weights, layout_.units[head()].padded_elements, type_ == DType::kBf16};
  float* const lanes = floats(operands, logits());
  launch("head", head_kernel, over(kToyWidth, stream), lanes, input_of(operation, operands),
         operands.valid_count, weights);
  launch("loss", sum_kernel, single(stream), operands.loss_sum, lanes, int64_t{kToyWidth});
  make_gradients(operation, operands, lanes, stream);
  if (operation.segment < 0)
    launch("backward", head_backward_kernel, over(kToyWidth, stream), floats(operands, flow()), lanes,
           weights);
}

void ToyProgram::head_backward(const Operation& operation, const Operands& operands,
                               cudaStream_t stream) const {
  const Weights weights{operands.weights, layout_.units[head()].padded_elements, type_ == DType::kBf16};
  float* const lanes = floats(operands, logits());
  if (operation.segment >= 0) make_gradients(operation, operands, lanes, stream);
  launch("backward", head_backward_kernel, over(kToyWidth, stream), floats(operands, flow()), lanes, weights);
}

void ToyProgram::backward(const Operation& operation, const Operands& operands, cudaStream_t stream) const {
  const int unit = operation.unit;
  float* const flows = floats(operands, flow());
  make_gradients(operation, operands, flows, stream);
  if (unit == 0) return;
  const Weights weights{operands.weights, layout_.units[unit].padded_elements, type_ == DType::kBf16};
  float* const saved =
      operation.kind == OpKind::kBackwardInput ? floats(operands, saved_flow(unit)) : nullptr;
  launch("backward", backward_kernel, over(kToyWidth, stream), flows, saved, floats(operands, kept(unit)),
         floats(operands, activation(unit)), weights);
}

// A backward pass in two parts makes the first slice of each segment in its first part; a head in two parts
// makes a segment in each.
void ToyProgram::make_gradients(const Operation& operation, const Operands& operands, const float* flows,
                                cudaStream_t stream) const {
  const UnitLayout& unit = layout_.units[operation.unit];
  const Weights weights{operands.weights, unit.padded_elements, type_ == DType::kBf16};
  for (const Slice& slice : unit.slices) {
    const bool first = slice.offset == unit.segments[static_cast<size_t>(slice.segment)].offset;
    if (operation.unit == head()) {
      if (operation.segment >= 0 && slice.segment != operation.segment) continue;
    } else if (operation.kind == OpKind::kBackwardInput && !first) {
      continue;
    }
    if (operation.kind == OpKind::kBackwardWeight && (first || slice.segment != operation.segment)) continue;
    launch("gradient", gradient_kernel, over(slice.elements, stream), operands.gradients, slice.offset,
           slice.elements, operation.accumulate, flows, input_of(operation, operands), weights);
  }
}

void ToyProgram::reduce(const Operation& operation, const Operands& operands, cudaStream_t stream) const {
  const UnitLayout& unit = layout_.units[operation.unit];
  for (const Segment& segment : segments_of(unit, operation.segment)) {
    const int64_t at = segment.shard_offset, count = segment.shard_elements;
    const int number = static_cast<int>(&segment - unit.segments.data());
    if (operation.kind == OpKind::kCast)
      launch("cast", cast_kernel, over(segment.padded_elements, stream),
             bf16s(operands.wire) + segment.offset, operands.gradients + segment.offset,
             segment.padded_elements);
    else if (operation.kind == OpKind::kSquareNorm)
      launch("norm", sum_kernel, single(stream), operands.norm_partials + partial_of(operation.unit, number),
             operands.gradient_shard + at, count);
    else if (policy_.reduce_type == DType::kBf16)
      launch("accumulate", accumulate_kernel<__nv_bfloat16>, over(count, stream),
             operands.gradient_shard + at, bf16s(operands.reduced_piece) + at, count, operation.accumulate);
    else
      launch("accumulate", accumulate_kernel<float>, over(count, stream), operands.gradient_shard + at,
             reinterpret_cast<float*>(operands.reduced_piece) + at, count, operation.accumulate);
  }
}

void ToyProgram::sum_scalars(const Operation& operation, const Operands& operands,
                             cudaStream_t stream) const {
  if (operation.kind == OpKind::kCollectLoss)
    launch("loss", collect_loss_kernel, single(stream), operands.loss_total, operands.loss_sum,
           policy_.micro_batches, operands.valid_count);
  else if (operation.kind == OpKind::kGate)
    launch("gate", gate_kernel, single(stream), operands.gate, operands.loss_total,
           floats(operands, scalar()));
  else if (operation.kind == OpKind::kCollectNorm)
    launch("norm", sum_kernel, single(stream), operands.norm_total, operands.norm_partials,
           partial_of(head() + 1, 0));
  else
    launch("clip", clip_kernel, single(stream), operands.clip, operands.norm_total);
}

void ToyProgram::update(const Operation& operation, const Operands& operands, cudaStream_t stream) const {
  const float* const factor = policy_.clip ? operands.clip + 1 : operands.gate;
  for (const Segment& segment : segments_of(layout_.units[operation.unit], operation.segment)) {
    const int64_t at = segment.shard_offset;
    const ToyMasters masters{operands.parameter_shard + at * size_of(type_),
                             operands.lower_half ? operands.lower_half + at : nullptr};
    launch("update", update_kernel, over(segment.shard_elements, stream), masters,
           reinterpret_cast<float*>(operands.moment1) + at, reinterpret_cast<float*>(operands.moment2) + at,
           operands.gradient_shard + at, segment.shard_elements, factor, floats(operands, scalar()));
  }
}

void ToyProgram::read_back(const Operands& operands, cudaStream_t stream) {
  float* const record =
      reinterpret_cast<float*>(history_.data()) + steps_read_++ * std::tuple_size_v<ToyRecord>;
  const auto copy = [&](int at, const float* from, int count) {
    cuda::check(cudaMemcpyAsync(record + at, from, count * sizeof(float), cudaMemcpyDeviceToHost, stream));
  };
  copy(0, operands.loss_total, 2);
  copy(2, operands.clip, 2);
  if (!policy_.clip) copy(4, operands.gate, 1);
}

std::vector<ToyRecord> ToyProgram::history() const {
  std::vector<ToyRecord> history(static_cast<size_t>(steps_read_));
  std::memcpy(history.data(), history_.data(), history.size() * sizeof(ToyRecord));
  return history;
}

float* ToyProgram::input_of(const Operation& operation, const Operands& operands) const {
  float* const lanes = floats(operands, input(operation.unit));
  return operation.unit == 0 ? lanes + operation.micro_batch * kToyWidth : lanes;
}

int64_t ToyProgram::partial_of(int unit, int segment) const {
  int64_t before = 0;
  for (int u = 0; u < unit; ++u) before += std::ssize(layout_.units[u].segments);
  return before + segment;
}

}  // namespace minillm::shard
