#include "shard/fsdp2.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <utility>

#include "core/error.h"

namespace minillm::shard {
namespace {

constexpr int kNone = -1;  // in place of a buffer
constexpr int kRoot = 0;   // group of the embedding and the head; a block's group has the number of its unit
constexpr int64_t kFp32Bytes = size_of(DType::kFp32);

// What FSDP2 gathers and reduces as one. Buffers that change from pass to pass are the latest.
struct Group {
  std::string name;
  std::vector<int> units;
  int64_t elements = 0, shard_elements = 0;
  int master = kNone, moments = kNone, gradient_shard = kNone;
  int gathered = kNone;  // rank after rank, as the collective leaves it
  int weights = kNone;   // parameter after parameter, as the passes read it
};

class Builder {
 public:
  Builder(const Layout& layout, const Fsdp2Options& options)
      : layout_(layout), options_(options), head_(static_cast<int>(layout.units.size()) - 1) {
    schedule_.shards = layout.world;
    schedule_.replicas = options.replicas;
    schedule_.micro_batches = options.micro_batches;
    schedule_.one_communicator = true;
    add_group("root", {0, head_});
    for (int unit = 1; unit < head_; ++unit) add_group(layout.units[unit].name, {unit});
    inputs_ = add("inputs", options.micro_batches * options.memory.inputs, Purpose::kInputs);
    for (int& state : all_gather_state_) state = add("all-gather state", 0, Purpose::kScratch);
    reduce_scatter_state_ = add("reduce-scatter state", 0, Purpose::kScratch);
    root_state_ = add("root state", 0, Purpose::kScratch);
    for (auto* per_unit : {&outputs_, &saved_, &output_gradients_, &weight_gradients_})
      per_unit->assign(layout.units.size(), kNone);
  }

  Fsdp2 build() && {
    emit(OpKind::kUpload, kNone, StreamId::kCompute, {root_state_}, {inputs_});
    for (micro_batch_ = 0; micro_batch_ < options_.micro_batches; ++micro_batch_) {
      forward();
      backward();
    }
    micro_batch_ = 0;
    if (options_.clip) clip();
    optimize();
    return {std::move(schedule_), std::move(buffers_)};
  }

 private:
  Group& group_of(int unit) { return groups_[unit == head_ ? kRoot : unit]; }
  int64_t parameter_bytes(int64_t elements) const { return elements * size_of(options_.parameter_type); }
  bool sharded() const { return layout_.world > 1; }
  bool casts() const { return options_.parameter_type != DType::kFp32; }

  int add(std::string name, int64_t bytes, Purpose purpose) {
    buffers_.push_back({std::move(name), bytes, purpose});
    return static_cast<int>(buffers_.size()) - 1;
  }

  int add_for(int unit, const char* what, int64_t bytes, Purpose purpose) {
    return add(layout_.units[unit].name + what, bytes, purpose);
  }

  void add_group(const std::string& name, const std::vector<int>& units) {
    Group group{.name = name, .units = units};
    for (int unit : units) {
      group.elements += layout_.units[unit].padded_elements;
      group.shard_elements += layout_.units[unit].shard_elements;
    }
    const int64_t bytes = kFp32Bytes * group.shard_elements;
    group.master = add(name + " master", bytes, Purpose::kParameters);
    group.moments = add(name + " moments", 2 * bytes, Purpose::kMoments);
    group.gradient_shard = add(name + " gradient shard", bytes, Purpose::kGradients);
    groups_.push_back(std::move(group));
  }

  Operation& emit(OpKind kind, int unit, StreamId stream, std::initializer_list<int> reads,
                  std::initializer_list<int> writes) {
    Operation operation{.kind = kind, .unit = unit, .stream = stream, .micro_batch = micro_batch_};
    const auto name = [](std::vector<Region>& regions, std::initializer_list<int> buffers) {
      for (int buffer : buffers)
        if (buffer != kNone) regions.push_back({RegionKind::kBuffer, buffer});
    };
    name(operation.reads, reads);
    name(operation.writes, writes);
    schedule_.operations.push_back(std::move(operation));
    return schedule_.operations.back();
  }

  // Copy-in and gather. `state` makes the copy-in wait for the copy-out that used it last; `held` is the
  // gathered buffer that is dropped once this gather has been issued.
  void gather(Group& group, int state, int held) {
    if (!sharded()) return;
    const int cast = add_cast(group, group.shard_elements);
    group.gathered = add(group.name + " gathered", parameter_bytes(group.elements), Purpose::kWeightSlots);
    for (int unit : group.units)
      emit(OpKind::kCopyIn, unit, StreamId::kCopy, {group.master},
           {cast, group.gathered, state, root_state(group)});
    for (int unit : group.units)
      emit(OpKind::kGather, unit, StreamId::kGather, {group.gathered, held}, {group.gathered});
  }

  // From the gathered buffer, or without sharding from the master weights, of which one tensor at a time is
  // cast.
  void copy_out(Group& group, int state) {
    group.weights = add(group.name + " weights", parameter_bytes(group.elements), Purpose::kWeightSlots);
    const int cast = sharded() ? kNone : add_cast(group, largest_tensor(group));
    for (int unit : group.units)
      if (sharded())
        emit(OpKind::kCopyOut, unit, StreamId::kCompute, {group.gathered, state}, {group.weights});
      else
        emit(OpKind::kCopyOut, unit, StreamId::kCompute, {group.master},
             {cast, group.weights, root_state(group)});
  }

  int root_state(const Group& group) const { return &group == &groups_[kRoot] ? root_state_ : kNone; }

  int add_cast(const Group& group, int64_t elements) {
    return casts() ? add(group.name + " cast", parameter_bytes(elements), Purpose::kWeightSlots) : kNone;
  }

  int64_t largest_tensor(const Group& group) const {
    int64_t elements = 0;
    for (int unit : group.units)
      for (const Slice& slice : layout_.units[unit].slices) elements = std::max(elements, slice.elements);
    return elements;
  }

  // The two states alternate, so that a copy-in waits for the copy-out of the last unit but one: two gathered
  // buffers exist.
  void forward() {
    int held = kNone;
    for (int unit = 0; unit < head_; ++unit) {
      Group& group = groups_[unit];
      const int state = all_gather_state_[unit % 2];
      gather(group, state, held);
      copy_out(group, state);
      forward_pass(unit);
      held = group.gathered;
    }
    loss();
  }

  void forward_pass(int unit) {
    const EagerMemory& memory = options_.memory;
    const Group& group = group_of(unit);
    const int input = unit == 0 ? inputs_ : outputs_[unit - 1];
    int extra = kNone;
    outputs_[unit] = add_for(unit, " output", memory.residual, Purpose::kActivations);
    if (unit > 0) {
      saved_[unit] = add_for(unit, " saved", memory.block_saved, Purpose::kActivations);
      extra = add_for(unit, " forward extra", memory.block_forward_extra, Purpose::kScratch);
    }
    // The gathered buffer of the last block is held until the root's forward pass ends.
    emit(OpKind::kForward, unit, StreamId::kCompute, {group.weights, group.gathered, input},
         {outputs_[unit], saved_[unit], extra});
  }

  void loss() {
    const int64_t leaves = options_.memory.residual + parameter_bytes(layout_.units[head_].padded_elements);
    const int extra =
        add("logits", std::max<int64_t>(0, options_.memory.loss - leaves), Purpose::kActivations);
    add_gradients(head_);
    emit(OpKind::kHeadLoss, head_, StreamId::kCompute, {groups_[kRoot].weights, outputs_[head_ - 1], inputs_},
         {extra, output_gradients_[head_ - 1], weight_gradients_[head_]})
        .writes.push_back({RegionKind::kLossSum, micro_batch_});
  }

  // What the backward pass of a unit makes: gradients of its weights and of its input.
  void add_gradients(int unit) {
    weight_gradients_[unit] = add_for(
        unit, " gradients", parameter_bytes(layout_.units[unit].padded_elements), Purpose::kGradientSlots);
    if (unit > 0)
      output_gradients_[unit - 1] =
          add_for(unit - 1, " output gradient", options_.memory.residual, Purpose::kActivations);
  }

  // The next unit is gathered before the pass and the weights are dropped before the reduction. One state
  // serves all gathers: each waits for the copy-out of the unit before it.
  void backward() {
    const int last = head_ - 1, state = all_gather_state_[last % 2];
    if (last > 0) gather(groups_[last], state, kNone);
    for (int unit = last; unit > 0; --unit) {
      copy_out(groups_[unit], state);
      if (unit > 1) gather(groups_[unit - 1], state, kNone);
      backward_pass(unit);
      reduce(groups_[unit]);
    }
    backward_pass(0);
    reduce(groups_[kRoot]);
    reduce_input_ = kNone;
  }

  // The gradients of a block's weights are not all there when most else is, so what the pass has at its peak
  // is a buffer of its own, and they are one from its end on.
  void backward_pass(int unit) {
    const EagerMemory& memory = options_.memory;
    const bool block = unit > 0;
    const int at_peak =
        !block ? kNone
               : add_for(unit, " backward", memory.block_backward - memory.residual, Purpose::kScratch);
    add_gradients(unit);
    // The previous unit's reduction input is dropped only after this pass.
    emit(OpKind::kBackward, unit, StreamId::kCompute,
         {group_of(unit).weights, saved_[unit], block ? outputs_[unit - 1] : inputs_, output_gradients_[unit],
          reduce_input_},
         {block ? output_gradients_[unit - 1] : weight_gradients_[unit], at_peak});
  }

  // The state makes the copy-in wait for the reduction before: one input exists at a time.
  void reduce(const Group& group) {
    const bool first = micro_batch_ == 0;
    reduce_input_ =
        add(group.name + " reduction input", kFp32Bytes * group.elements, Purpose::kGradientSlots);
    const int reduced =
        first ? group.gradient_shard
              : add(group.name + " reduced", kFp32Bytes * group.shard_elements, Purpose::kGradientSlots);
    for (int unit : group.units)
      emit(OpKind::kReduceCopyIn, unit, StreamId::kCompute, {},
           {weight_gradients_[unit], reduce_input_, reduce_scatter_state_});
    for (int unit : group.units)
      emit(sharded() ? OpKind::kReduceScatter : OpKind::kAccumulate, unit, StreamId::kReduce,
           {reduce_input_, reduce_scatter_state_, root_state_}, {reduced});
    const bool replicated = options_.replicas > 1;
    if (replicated)
      for (int unit : group.units)
        emit(OpKind::kAllReduceGradient, unit, StreamId::kReplicate, {reduced, root_state_}, {reduced});
    if (first) return;
    for (int unit : group.units)
      emit(OpKind::kAccumulate, unit, replicated ? StreamId::kReplicate : StreamId::kReduce,
           {reduced, group.gradient_shard, root_state_}, {group.gradient_shard})
          .accumulate = true;
  }

  void clip() {
    std::vector<Region> partials;
    for (int unit = 0; unit <= head_; ++unit) {
      partials.push_back({RegionKind::kNormPartial, unit});
      emit(OpKind::kSquareNorm, unit, StreamId::kCompute, {group_of(unit).gradient_shard}, {})
          .writes.push_back(partials.back());
    }
    Operation& collect = emit(OpKind::kCollectNorm, kNone, StreamId::kCompute, {}, {});
    collect.reads = partials;
    collect.writes = {{RegionKind::kNormTotal}};
    if (sharded()) {
      Operation& sum = emit(OpKind::kAllReduceNorm, kNone, StreamId::kReduce, {}, {});
      sum.reads = sum.writes = {{RegionKind::kNormTotal}};
    }
    Operation& clip = emit(OpKind::kClip, kNone, StreamId::kCompute, {}, {});
    for (const Group& group : groups_) clip.writes.push_back({RegionKind::kBuffer, group.gradient_shard});
    clip.reads = clip.writes;
    clip.reads.push_back({RegionKind::kNormTotal});
    clip.writes.push_back({RegionKind::kClip});
  }

  // The root's shards come first and are reduced last: with them, all updates wait for all reductions.
  void optimize() {
    for (int unit = 0; unit <= head_; ++unit) {
      const Group& group = group_of(unit);
      emit(OpKind::kUpdate, unit, StreamId::kCompute, {group.gradient_shard, group.master, group.moments},
           {group.master, group.moments});
    }
    Operation& read_back = emit(OpKind::kReadBack, kNone, StreamId::kCompute, {}, {});
    for (int m = 0; m < options_.micro_batches; ++m) read_back.reads.push_back({RegionKind::kLossSum, m});
    if (options_.clip) read_back.reads.push_back({RegionKind::kClip});
  }

  const Layout& layout_;
  const Fsdp2Options& options_;
  const int head_;
  int micro_batch_ = 0;
  Schedule schedule_;
  std::vector<BufferSpec> buffers_;
  std::vector<Group> groups_;
  int inputs_ = kNone;
  // Events: of copy-outs, for later copy-ins; of reductions, for the next copy-in; and of all that is
  // enqueued when the root's forward pass begins, which its copy-in waits for.
  std::array<int, 2> all_gather_state_{};
  int reduce_scatter_state_ = kNone, root_state_ = kNone;
  int reduce_input_ = kNone;                                                // the latest, until it is dropped
  std::vector<int> outputs_, saved_, output_gradients_, weight_gradients_;  // by unit, the latest
};

}  // namespace

Fsdp2 build_fsdp2(const Layout& layout, const Fsdp2Options& options) {
  const auto check = [](const char* what, int64_t found, int64_t least) {
    if (found < least)
      throw InternalError("build_fsdp2: " + std::to_string(found) + " " + what + "; " +
                          std::to_string(least) + " or more are needed");
  };
  check("units", std::ssize(layout.units), 2);
  check("replicas", options.replicas, 1);
  check("micro-batches", options.micro_batches, 1);
  return Builder(layout, options).build();
}

int64_t copy_bytes(const Operation& operation, const Layout& layout, DType parameter_type) {
  const int64_t size = size_of(parameter_type);
  const int64_t cast = parameter_type == DType::kFp32 ? 0 : kFp32Bytes + size;
  const auto unit = [&]() -> const UnitLayout& { return layout.units[operation.unit]; };
  switch (operation.kind) {
    case OpKind::kCopyIn:
      return unit().shard_elements * (cast + 2 * size);
    case OpKind::kCopyOut:
      return unit().padded_elements * ((layout.world > 1 ? 0 : cast) + 2 * size);
    case OpKind::kReduceCopyIn:
      return unit().padded_elements * (size + kFp32Bytes);
    case OpKind::kClip:
      return layout.shard_elements() * 2 * kFp32Bytes;
    default:
      return 0;
  }
}

MemoryPlan live_memory(const Fsdp2& step, const Layout& layout) {
  const std::vector<Operation>& operations = step.schedule.operations;
  const int end = static_cast<int>(operations.size());
  MemoryPlan plan;
  for (const BufferSpec& buffer : step.buffers) {
    const bool static_memory = buffer.purpose == Purpose::kParameters || buffer.purpose == Purpose::kMoments;
    plan.placements.push_back({.name = buffer.name,
                               .purpose = buffer.purpose,
                               .bytes = buffer.bytes,
                               .first = static_memory ? 0 : end,
                               .last = static_memory ? end - 1 : -1});
  }
  for (int i = 0; i < end; ++i)
    for (const auto* regions : {&operations[i].reads, &operations[i].writes})
      for (const Region& region : *regions) {
        if (region.kind != RegionKind::kBuffer) continue;
        Placement& placement = plan.placements[region.index];
        placement.first = std::min(placement.first, i);
        placement.last = std::max(placement.last, i);
      }
  std::erase_if(plan.placements, [](const Placement& p) { return p.bytes == 0; });
  std::vector<int64_t> live(operations.size());
  for (const Placement& placement : plan.placements)
    for (int i = placement.first; i <= placement.last; ++i) live[i] += placement.bytes;
  const auto peak = std::max_element(live.begin(), live.end());
  plan.bytes = *peak;
  plan.peak_operation = describe(operations[peak - live.begin()], layout.unit_names());
  return plan;
}

}  // namespace minillm::shard
