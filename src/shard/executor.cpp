#include "shard/executor.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "cuda/check.h"

namespace minillm::shard {
namespace {

// Waits are met by the last record of the other operation's event. That is this step's record for an
// operation issued earlier in the list, else the one of the step before. So a wait for this step needs an
// operation that comes earlier; and a wait for the step before is met in any case, where it names an earlier
// operation by that one's copy of this step, which follows on the same stream. One event per operation serves
// both.
void check_waits(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits) {
  const int count = static_cast<int>(schedule.operations.size());
  if (waits.size() != schedule.operations.size())
    throw InternalError("Executor: waits for " + std::to_string(waits.size()) +
                        " operations, but the schedule has " + std::to_string(count));
  for (int i = 0; i < count; ++i)
    for (const Wait& wait : waits[i]) {
      const bool issued = wait.steps_back == 1 || (wait.steps_back == 0 && wait.operation < i);
      if (wait.operation < 0 || wait.operation >= count || !issued)
        throw InternalError("Executor: operation " + std::to_string(i) + " waits for operation " +
                            std::to_string(wait.operation) + ", " + std::to_string(wait.steps_back) +
                            " steps back, which is not issued before it");
    }
}

void check_communicators(int world, const Communicators& communicators) {
  if (world == 1) return;
  for (const comm::Communicator* communicator : {communicators.gather, communicators.reduce})
    if (communicator == nullptr || communicator->size() != world)
      throw InternalError(
          "Executor: the schedule is for " + std::to_string(world) + " ranks, a communicator " +
          (communicator == nullptr ? "is missing" : "has " + std::to_string(communicator->size())));
}

// Gradient slots serve units of different layouts, so what is padding to one unit held gradients of another.
void zero_padding(const UnitLayout& unit, float* gradients, cudaStream_t stream) {
  int64_t begin = 0;
  const auto zero_until = [&](int64_t end) {
    if (begin < end)
      cuda::check(
          cudaMemsetAsync(gradients + begin, 0, static_cast<size_t>(end - begin) * sizeof(float), stream));
  };
  for (const Slice& slice : unit.slices) {
    zero_until(slice.offset);
    begin = slice.offset + slice.elements;
  }
  zero_until(unit.padded_elements);
}

}  // namespace

Executor::Executor(const Schedule& schedule, const Layout& layout, const MemoryPlan& plan,
                   std::vector<std::vector<Wait>> waits, Program& program, Communicators communicators,
                   std::byte* arena, DType parameter_type)
    : schedule_(schedule),
      layout_(layout),
      plan_(plan),
      waits_(std::move(waits)),
      program_(program),
      communicators_(communicators),
      arena_(arena),
      parameter_type_(parameter_type),
      event_of_operation_(schedule.operations.size(), -1) {
  check_waits(schedule_, waits_);
  check_communicators(schedule_.world, communicators_);
  for (int64_t offset : plan_.buffer) buffers_.push_back(arena_ + offset);
  // A collective that starts late delays every rank, a kernel only its own.
  streams_.emplace_back(cuda::StreamPriority::kNormal);
  streams_.emplace_back(cuda::StreamPriority::kHigh);
  streams_.emplace_back(cuda::StreamPriority::kHigh);
  for (const std::vector<Wait>& list : waits_)
    for (const Wait& wait : list) {
      int& event = event_of_operation_[wait.operation];
      if (event >= 0) continue;
      event = static_cast<int>(events_.size());
      events_.emplace_back();
    }
}

void Executor::step() {
  for (size_t i = 0; i < schedule_.operations.size(); ++i) {
    const Operation& operation = schedule_.operations[i];
    for (const Wait& wait : waits_[i])
      events_[event_of_operation_[wait.operation]].wait_on(stream(operation.stream));
    issue(operation);
    if (event_of_operation_[i] >= 0) events_[event_of_operation_[i]].record(stream(operation.stream));
  }
}

void Executor::synchronize() {
  for (const cuda::Stream& stream : streams_) stream.synchronize();
}

cudaStream_t Executor::stream(StreamId id) const {
  return streams_[static_cast<size_t>(id)].get();
}

// An operation is given the addresses of the regions that it declares and no others, so that work on a region
// which the schedule does not know of fails at once instead of racing.
Operands Executor::operands(const Operation& operation) const {
  const auto floats = [&](int64_t offset) { return reinterpret_cast<float*>(arena_ + offset); };
  Operands given;
  given.buffers = buffers_.data();
  const auto give = [&](const Region& region, bool written) {
    const int index = region.index;
    switch (region.kind) {
      case RegionKind::kParameterShard:
        if (written)
          given.parameter_shard = arena_ + plan_.parameter_shard[index];
        else
          given.weights = arena_ + plan_.parameter_shard[index];
        break;
      case RegionKind::kOptimizerShard:
        given.master = floats(plan_.master[index]);
        given.moment1 = arena_ + plan_.moment1[index];
        given.moment2 = arena_ + plan_.moment2[index];
        break;
      case RegionKind::kGradientShard:
        (written ? given.gradients : given.gradient_shard) = floats(plan_.gradient_shard[index]);
        break;
      case RegionKind::kWeightSlot:
        given.weights = arena_ + plan_.weight_slot[index];
        break;
      case RegionKind::kGradientSlot:
        given.gradients = floats(plan_.gradient_slot[index]);
        break;
      case RegionKind::kBuffer:
        break;
      case RegionKind::kValidCount:
        given.valid_count = floats(plan_.valid_count);
        break;
      case RegionKind::kLossSum:
        given.loss_sum = floats(plan_.loss_sum);
        break;
      case RegionKind::kNormPartial:
        given.norm_partials = floats(plan_.norm_partials);
        break;
      case RegionKind::kStats:
        given.stats = floats(plan_.stats);
        break;
      case RegionKind::kClip:
        given.clip = floats(plan_.clip);
        break;
    }
  };
  for (const Region& region : operation.reads) give(region, false);
  for (const Region& region : operation.writes) give(region, true);
  return given;
}

void Executor::issue(const Operation& operation) {
  const cudaStream_t on = stream(operation.stream);
  const auto floats = [&](int64_t offset) { return reinterpret_cast<float*>(arena_ + offset); };
  switch (operation.kind) {
    case OpKind::kGather:
      communicators_.gather->all_gather(arena_ + plan_.weight_slot[operation.weight_slot],
                                        arena_ + plan_.parameter_shard[operation.unit],
                                        layout_.units[operation.unit].shard_elements, parameter_type_, on);
      return;
    case OpKind::kReduceScatter:
      communicators_.reduce->reduce_scatter(floats(plan_.gradient_shard[operation.unit]),
                                            floats(plan_.gradient_slot[operation.gradient_slot]),
                                            layout_.units[operation.unit].shard_elements, on);
      return;
    case OpKind::kAllReduceCount:
      communicators_.reduce->all_reduce(floats(plan_.valid_count), 1, on);
      return;
    case OpKind::kAllReduceStats:
      communicators_.reduce->all_reduce(floats(plan_.stats), 2, on);
      return;
    default:
      break;
  }
  const Operands given = operands(operation);
  if (given.gradients != nullptr) zero_padding(layout_.units[operation.unit], given.gradients, on);
  program_.compute(operation, given, on);
}

}  // namespace minillm::shard
