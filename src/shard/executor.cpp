#include "shard/executor.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "cuda/check.h"

namespace minillm::shard {
namespace {

void check_communicator(const char* name, const comm::Communicator* communicator, int size) {
  const int found = communicator == nullptr ? 1 : communicator->size();
  if (found != size)
    throw InternalError(std::string("Executor: the ") + name + " communicator has " + std::to_string(found) +
                        " ranks, the schedule wants " + std::to_string(size));
}

// Gradient slots serve units of different layouts, so what is padding to one unit held gradients of another.
// Segments that another operation makes may be on their way already, and are left alone.
void zero_padding(const UnitLayout& unit, int only_segment, float* gradients, cudaStream_t stream) {
  const std::span<const Segment> segments = segments_of(unit, only_segment);
  int64_t begin = segments.front().offset;
  const auto zero_until = [&](int64_t end) {
    if (begin < end)
      cuda::check(
          cudaMemsetAsync(gradients + begin, 0, static_cast<size_t>(end - begin) * sizeof(float), stream));
  };
  for (const Slice& slice : unit.slices) {
    if (only_segment >= 0 && slice.segment != only_segment) continue;
    zero_until(slice.offset);
    begin = slice.offset + slice.elements;
  }
  zero_until(segments.back().offset + segments.back().padded_elements);
}

}  // namespace

Executor::Executor(const Schedule& schedule, const Layout& layout, const MemoryPlan& plan,
                   std::vector<std::vector<Wait>> waits, Program& program, Communicators communicators,
                   std::byte* arena, DType parameter_type, Launch launch)
    : schedule_(schedule),
      layout_(layout),
      plan_(plan),
      waits_(std::move(waits)),
      program_(program),
      communicators_(communicators),
      arena_(arena),
      parameter_type_(parameter_type),
      launch_(launch),
      event_of_operation_(schedule.operations.size(), -1) {
  // Waits are met by the last record of the other operation's event. That is this step's record for an
  // operation issued earlier in the list, else the one of the step before. So a wait for this step needs an
  // operation that comes earlier; and a wait for the step before is met in any case, where it names an
  // earlier operation by that one's copy of this step, which follows on the same stream. One event per
  // operation serves both.
  check_waits("Executor", schedule_, waits_);
  check_communicator("gather", communicators_.gather, schedule_.shards);
  check_communicator("reduce", communicators_.reduce, schedule_.shards);
  check_communicator("replicate", communicators_.replicate, schedule_.replicas);
  for (int64_t offset : plan_.buffer) buffers_.push_back(offset < 0 ? nullptr : arena_ + offset);
  for (int id = 0; id < kStreamCount; ++id) {
    // A collective that starts late delays every rank, a kernel only its own.
    const bool compute =
        id == static_cast<int>(StreamId::kCompute) || id == static_cast<int>(StreamId::kUpdate);
    streams_.emplace_back(compute ? cuda::StreamPriority::kNormal : cuda::StreamPriority::kHigh);
    fork_and_join_.emplace_back();
  }
  for (const std::vector<Wait>& list : waits_)
    for (const Wait& wait : list) {
      int& event = event_of_operation_[wait.operation];
      if (event >= 0) continue;
      event = static_cast<int>(events_.size());
      events_.emplace_back();
    }
}

void Executor::step() {
  if (!gathered_ahead_) gather_ahead();
  gathered_ahead_ = true;
  // The first step is not captured: libraries set themselves up in it.
  if (launch_ == Launch::kGraph && ran_before_)
    run_graph();
  else
    run_eagerly();
  ran_before_ = true;
}

// What the end of a step before would have gathered. Its inputs come from elsewhere, so all streams wait.
void Executor::gather_ahead() {
  synchronize();
  for (size_t i = 0; i < schedule_.operations.size(); ++i) {
    const Operation& operation = schedule_.operations[i];
    if (!operation.next_step) continue;
    issue(operation, stream(operation.stream));
    if (event_of_operation_[i] >= 0) events_[event_of_operation_[i]].record(stream(operation.stream));
  }
  synchronize();
}

void Executor::issue_in_order(size_t index, bool captures) {
  const Operation& operation = schedule_.operations[index];
  const cudaStream_t on = stream(operation.stream);
  // A captured step follows all of the step before, and its own work with the host before the launch.
  const auto is_met = [&](const Wait& wait) {
    return captures && (wait.steps_back > 0 || touches_host(schedule_.operations[wait.operation].kind));
  };
  for (const Wait& wait : waits_[index])
    if (!is_met(wait)) events_[event_of_operation_[wait.operation]].wait_on(on);
  issue_observed(index, on);
  if (event_of_operation_[index] >= 0) events_[event_of_operation_[index]].record(on);
}

void Executor::run_eagerly() {
  for (size_t i = 0; i < schedule_.operations.size(); ++i) issue_in_order(i, /*captures=*/false);
}

// What touches the host stays outside, on the stream that the graph is launched on: it reads and writes other
// places of the host's memory in every step.
void Executor::run_graph() {
  const cudaStream_t on = stream(StreamId::kCompute);
  if (!graph_) {
    synchronize();
    capture();
  }
  const auto issue_all = [&](auto belongs) {
    for (size_t i = 0; i < schedule_.operations.size(); ++i) {
      const OpKind kind = schedule_.operations[i].kind;
      if (touches_host(kind) && belongs(kind)) issue_observed(i, on);
    }
  };
  issue_all([](OpKind kind) { return kind != OpKind::kReadBack; });
  graph_->launch(on);
  issue_all([](OpKind kind) { return kind == OpKind::kReadBack; });
}

// All streams are forked from one and joined to it again, so the graph waits for the whole step before.
void Executor::capture() {
  const cudaStream_t origin = stream(StreamId::kCompute);
  graph_ = cuda::Graph::capture(origin, [&] {
    const auto for_each_other = [&](auto visit) {
      for (size_t id = 0; id < streams_.size(); ++id)
        if (streams_[id].get() != origin && is_used(static_cast<StreamId>(id)))
          visit(fork_and_join_[id], streams_[id].get());
    };
    fork_and_join_.front().record(origin);
    for_each_other([&](const cuda::Event&, cudaStream_t other) { fork_and_join_.front().wait_on(other); });
    for (size_t i = 0; i < schedule_.operations.size(); ++i)
      if (!touches_host(schedule_.operations[i].kind)) issue_in_order(i, /*captures=*/true);
    for_each_other([&](const cuda::Event& end, cudaStream_t other) {
      end.record(other);
      end.wait_on(origin);
    });
  });
}

bool Executor::is_used(StreamId id) const {
  return std::any_of(
      schedule_.operations.begin(), schedule_.operations.end(),
      [&](const Operation& operation) { return operation.stream == id && !touches_host(operation.kind); });
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
  const auto bytes = [&](int64_t offset) { return arena_ + offset; };
  Operands given;
  given.buffers = buffers_.data();
  const auto give = [&](const Region& region) {
    const auto index = static_cast<size_t>(region.index);
    switch (region.kind) {
      case RegionKind::kParameterShard:
        if (operation.kind == OpKind::kUpdate)
          given.parameter_shard = bytes(plan_.parameter_shard[index]);
        else
          given.weights = bytes(plan_.parameter_shard[index]);
        break;
      case RegionKind::kOptimizerShard:
        if (plan_.lower_half[index] >= 0)
          given.lower_half = reinterpret_cast<uint16_t*>(bytes(plan_.lower_half[index]));
        given.moment1 = bytes(plan_.moment1[index]);
        given.moment2 = bytes(plan_.moment2[index]);
        break;
      case RegionKind::kGradientShard:
        (makes_gradients(operation.kind) ? given.gradients : given.gradient_shard) =
            floats(plan_.shard_slot[index]);
        break;
      case RegionKind::kWeightSlot:
        given.weights = bytes(plan_.weight_slot[index]);
        break;
      case RegionKind::kGradientSlot:
        given.gradients = floats(plan_.gradient_slot[index]);
        break;
      case RegionKind::kWireSlot:
        given.wire = bytes(plan_.wire);
        break;
      case RegionKind::kReducedPiece:
        given.reduced_piece = bytes(plan_.reduced_piece);
        break;
      case RegionKind::kBuffer:
        break;
      case RegionKind::kValidCount:
        given.valid_count = floats(plan_.valid_count);
        break;
      case RegionKind::kLossSum:
        given.loss_sum = floats(plan_.loss_sum) + operation.micro_batch;
        break;
      case RegionKind::kLossTotal:
        given.loss_total = floats(plan_.loss_total);
        break;
      case RegionKind::kGate:
        given.gate = floats(plan_.gate);
        break;
      case RegionKind::kNormPartial:
        given.norm_partials = floats(plan_.norm_partials);
        break;
      case RegionKind::kNormTotal:
        given.norm_total = floats(plan_.norm_total);
        break;
      case RegionKind::kClip:
        given.clip = floats(plan_.clip);
        break;
    }
  };
  for (const Region& region : operation.reads) give(region);
  for (const Region& region : operation.writes) give(region);
  return given;
}

void Executor::issue(const Operation& operation, cudaStream_t on) {
  if (is_collective(operation.kind)) return communicate(operation, on);
  const Operands given = operands(operation);
  const bool starts_gradients = makes_gradients(operation.kind) && given.gradients != nullptr &&
                                operation.kind != OpKind::kBackwardWeight && !operation.accumulate;
  if (starts_gradients) zero_padding(layout_.units[operation.unit], operation.segment, given.gradients, on);
  program_.compute(operation, given, on);
}

void Executor::issue_observed(size_t index, cudaStream_t on) {
  issue(schedule_.operations[index], on);
  if (observer_) observer_(static_cast<int>(index), on);
}

void Executor::communicate(const Operation& operation, cudaStream_t on) {
  switch (operation.kind) {
    case OpKind::kGather:
      return gather(operation, on);
    case OpKind::kReduceScatter:
      return reduce_scatter(operation, on);
    case OpKind::kAllReduceGradient:
      return all_reduce(operation, on);
    case OpKind::kAllReduceCount:
      return sum_over_ranks(floats(plan_.valid_count), on);
    case OpKind::kAllReduceLoss:
      return sum_over_ranks(floats(plan_.loss_total), on);
    case OpKind::kAllReduceNorm:
      return communicators_.reduce->all_reduce(floats(plan_.norm_total), 1, on);
    default:
      throw InternalError("Executor: '" + describe(operation, {}) + "' is no collective");
  }
}

void Executor::gather(const Operation& operation, cudaStream_t on) {
  const int64_t element = size_of(parameter_type_);
  std::byte* const full = arena_ + plan_.weight_slot[operation.weight_slot];
  const std::byte* const shard = arena_ + plan_.parameter_shard[operation.unit];
  communicators_.gather->fuse([&] {
    for (const Segment& segment : segments_of(layout_.units[operation.unit], operation.segment))
      communicators_.gather->all_gather(full + segment.offset * element,
                                        shard + segment.shard_offset * element, segment.shard_elements,
                                        parameter_type_, on);
  });
}

// From the gradient slot, or from the wire slot in another type; to the shard, or to a piece of its own.
void Executor::reduce_scatter(const Operation& operation, cudaStream_t on) {
  const DType type = operation.gradient_slot < 0 ? schedule_.reduce_type : DType::kFp32;
  const int64_t element = size_of(type);
  const std::byte* const full =
      arena_ + (operation.gradient_slot < 0 ? plan_.wire : plan_.gradient_slot[operation.gradient_slot]);
  std::byte* const shard =
      arena_ + (operation.shard_slot < 0 ? plan_.reduced_piece : plan_.shard_slot[operation.shard_slot]);
  communicators_.reduce->fuse([&] {
    for (const Segment& segment : segments_of(layout_.units[operation.unit], operation.segment))
      communicators_.reduce->reduce_scatter(shard + segment.shard_offset * element,
                                            full + segment.offset * element, segment.shard_elements, type,
                                            on);
  });
}

// A shard is one range, whatever its segments.
void Executor::all_reduce(const Operation& operation, cudaStream_t on) {
  const std::span<const Segment> segments = segments_of(layout_.units[operation.unit], operation.segment);
  const int64_t begin = segments.front().shard_offset;
  const int64_t end = segments.back().shard_offset + segments.back().shard_elements;
  communicators_.replicate->all_reduce(floats(plan_.shard_slot[operation.shard_slot]) + begin, end - begin,
                                       on);
}

// Over the shards of a replica, then over replicas: no communicator of all ranks is needed.
void Executor::sum_over_ranks(float* value, cudaStream_t on) const {
  if (communicators_.reduce != nullptr) communicators_.reduce->all_reduce(value, 1, on);
  if (communicators_.replicate != nullptr) communicators_.replicate->all_reduce(value, 1, on);
}

}  // namespace minillm::shard
