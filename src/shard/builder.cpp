#include "shard/builder.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "core/error.h"
#include "shard/turns.h"

namespace minillm::shard {
namespace {

void check_slots(const char* key, int found, int least, const char* reason) {
  if (found >= least) return;
  throw UsageError("parallel." + std::string(key) + " is " + std::to_string(found) + "; it must be " +
                   std::to_string(least) + " or more, because " + reason + ". Use 2, the default.");
}

class Builder {
 public:
  Builder(const Layout& layout, const Program& program, const Policy& policy)
      : layout_(layout),
        program_(program),
        policy_(policy),
        units_(static_cast<int>(layout.units.size())),
        turns_(make_turns(layout, policy)),
        parts_(layout, PlaceParts::Of::kFlatBuffers),
        shard_parts_(layout, PlaceParts::Of::kShards) {
    schedule_.shards = layout.world;
    schedule_.replicas = policy.replicas;
    schedule_.micro_batches = policy.micro_batches;
    schedule_.reduce_type = sharded() ? policy.reduce_type : DType::kFp32;
    plan_weight_slots();
    plan_gradient_slots();
  }

  Schedule build() && {
    begin();
    for (size_t turn = 0; turn < turns_.size(); ++turn) take_turn(static_cast<int>(turn));
    collect_norm();
    if (policy_.clip)
      for (int unit = 0; unit < units_; ++unit) update(unit, -1);
    add(operation(OpKind::kReadBack, StreamId::kUpdate), read_back_regions(), {});
    return std::move(schedule_);
  }

 private:
  using Regions = std::vector<Region>;

  bool sharded() const { return layout_.world > 1; }
  bool replicated() const { return policy_.replicas > 1; }
  bool is_last(int micro_batch) const { return micro_batch + 1 == policy_.micro_batches; }
  /// Whether gradients of several micro-batches meet before they are reduced.
  bool adds_unreduced() const { return !sharded() || !policy_.reduce_every_micro_batch; }
  /// Whether a reduce-scatter must not write to the shard itself.
  bool reduces_apart() const {
    return sharded() && (schedule_.reduce_type != DType::kFp32 ||
                         (policy_.micro_batches > 1 && policy_.reduce_every_micro_batch));
  }

  // --- slots ----------------------------------------------------------------------------------------------

  void plan_weight_slots() {
    if (!sharded()) return;
    weights_ = plan_weights(layout_, turns_, policy_.weight_slots);
    std::ranges::stable_sort(weights_.this_step, {}, &PlannedGather::after);
    schedule_.weight_slots = weights_.slots;
    next_step_.assign(weights_.next_step.begin(), weights_.next_step.end());
  }

  void plan_gradient_slots() {
    const bool meet = policy_.micro_batches > 1 && adds_unreduced();
    const bool shards_last = policy_.clip || policy_.keep_gradients || policy_.micro_batches > 1;
    gradients_ = plan_gradients(turns_, policy_.gradient_slots, sharded() ? meet : shards_last);
    std::vector<Slot>& made = sharded() ? schedule_.gradient_slots : schedule_.shard_slots;
    made.resize(static_cast<size_t>(gradients_.slots));
    for (size_t i = 0; i < turns_.size(); ++i)
      if (const int slot = gradients_.slot_of_turn[i]; slot >= 0)
        made[slot].elements = std::max(made[slot].elements, layout_.units[turns_[i].unit].padded_elements);
    if (sharded()) plan_shard_slots(shards_last);
  }

  void plan_shard_slots(bool slot_per_unit) {
    shard_slots_ = slot_per_unit ? units_ : std::min(units_, std::max(2, policy_.gradient_slots));
    schedule_.shard_slots.resize(static_cast<size_t>(shard_slots_));
    for (const Turn& turn : turns_) {
      if (turn.gradients != Gradients::kComplete) continue;
      const UnitLayout& unit = layout_.units[turn.unit];
      if (slot_per_unit) shard_slot_of_unit_[turn.unit] = turn.unit;
      int64_t& elements = schedule_.shard_slots[shard_slot(turn.unit)].elements;
      elements = std::max(elements, unit.shard_elements);
      if (schedule_.reduce_type != DType::kFp32)
        schedule_.wire_elements = std::max(schedule_.wire_elements, unit.padded_elements);
      if (reduces_apart())
        schedule_.reduced_elements = std::max(schedule_.reduced_elements, unit.shard_elements);
    }
  }

  // Units take shard slots in the order in which they are reduced first.
  int shard_slot(int unit) {
    return shard_slot_of_unit_.try_emplace(unit, static_cast<int>(shard_slot_of_unit_.size()) % shard_slots_)
        .first->second;
  }

  // --- operations -----------------------------------------------------------------------------------------

  static Operation operation(OpKind kind, StreamId stream, int unit = -1, int segment = -1,
                             int micro_batch = 0) {
    return {.kind = kind, .unit = unit, .stream = stream, .segment = segment, .micro_batch = micro_batch};
  }

  void add(Operation operation, Regions reads, Regions writes) {
    operation.reads = std::move(reads);
    operation.writes = std::move(writes);
    if (!is_collective(operation.kind)) {
      const BufferUse use = program_.uses(operation);
      for (int buffer : use.reads) operation.reads.push_back({RegionKind::kBuffer, buffer});
      for (int buffer : use.writes) operation.writes.push_back({RegionKind::kBuffer, buffer});
    }
    schedule_.operations.push_back(std::move(operation));
  }

  static Regions parts_of(RegionKind kind, int index, PlaceParts::Range parts) {
    Regions regions;
    for (int part = parts.first; part < parts.end; ++part) regions.push_back({kind, index, part});
    return regions;
  }

  // Segments of a unit's own memory.
  Regions of_unit(RegionKind kind, int unit, int segment) const {
    const int all = static_cast<int>(layout_.units[unit].segments.size());
    return parts_of(kind, unit,
                    segment < 0 ? PlaceParts::Range{0, all} : PlaceParts::Range{segment, segment + 1});
  }

  // Segments of a slot, which units take in turn.
  Regions of_slot(RegionKind kind, int slot, int unit, int segment) const {
    const PlaceParts& parts = kind == RegionKind::kGradientShard ? shard_parts_ : parts_;
    return parts_of(kind, slot, parts.of(layout_.units[unit], segment));
  }

  static Regions join(Regions a, const Regions& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  void sum_over_ranks(OpKind kind, RegionKind what) {
    add(operation(kind, StreamId::kReduce), {{what}}, {{what}});
  }

  // --- the step -------------------------------------------------------------------------------------------

  void begin() {
    add(operation(OpKind::kUpload, StreamId::kCompute), {}, {});
    add(operation(OpKind::kBegin, StreamId::kCompute), {}, {{RegionKind::kValidCount}});
    if (schedule_.world() > 1) sum_over_ranks(OpKind::kAllReduceCount, RegionKind::kValidCount);
    add(operation(OpKind::kSetStep, StreamId::kUpdate), {}, {});
  }

  void take_turn(int index) {
    const Turn& turn = turns_[index];
    Operation compute = operation(turn.kind, StreamId::kCompute, turn.unit, turn.segment, turn.micro_batch);
    Regions reads = use_weights(compute, index);
    Regions writes = make_gradients(compute, index);
    if (compute.accumulate) reads = join(std::move(reads), writes);
    if (turn.kind == OpKind::kHeadLoss) {
      reads.push_back({RegionKind::kValidCount});
      writes.push_back({RegionKind::kLossSum, turn.micro_batch});
    }
    add(std::move(compute), std::move(reads), std::move(writes));
    gather_after(index);
    if (turn.kind == OpKind::kHeadLoss && is_last(turn.micro_batch)) collect_loss();
    if (turn.kind == OpKind::kBackwardInput && turn.unit + 1 == units_)
      for (int segment : std::exchange(held_updates_, {})) update(turn.unit, segment);
    if (turn.gradients == Gradients::kComplete) reduce(index);
  }

  // Without sharding a segment is updated while others of the unit still wait for their gradients, so the
  // weights that kBackwardWeight sees are those of its own segment only. The other passes see them all.
  Regions use_weights(Operation& compute, int turn) const {
    if (!sharded())
      return compute.kind == OpKind::kBackward && compute.unit == 0
                 ? Regions{}
                 : of_unit(RegionKind::kParameterShard, compute.unit,
                           compute.kind == OpKind::kBackwardWeight ? compute.segment : -1);
    compute.weight_slot = weights_.slot_of_turn[turn];
    return compute.weight_slot < 0 ? Regions{}
                                   : of_slot(RegionKind::kWeightSlot, compute.weight_slot, compute.unit, -1);
  }

  Regions make_gradients(Operation& compute, int turn) const {
    const int slot = gradients_.slot_of_turn[turn];
    if (slot < 0) return {};
    (sharded() ? compute.gradient_slot : compute.shard_slot) = slot;
    compute.accumulate = compute.micro_batch > 0 && adds_unreduced();
    return of_slot(sharded() ? RegionKind::kGradientSlot : RegionKind::kGradientShard, slot, compute.unit,
                   compute.segment);
  }

  void gather(const PlannedGather& planned, int segment, bool next_step) {
    Operation gather = operation(OpKind::kGather, StreamId::kGather, planned.unit, segment);
    gather.weight_slot = planned.slot;
    gather.next_step = next_step;
    add(std::move(gather), of_unit(RegionKind::kParameterShard, planned.unit, segment),
        of_slot(RegionKind::kWeightSlot, planned.slot, planned.unit, segment));
  }

  void gather_after(int turn) {
    turns_done_ = turn;
    for (; gathers_done_ < weights_.this_step.size() && weights_.this_step[gathers_done_].after <= turn;
         ++gathers_done_)
      gather(weights_.this_step[gathers_done_], -1, false);
    gather_for_next_step();
  }

  // In the order of use: a gather that waits for an update holds up those after it, which are needed later. A
  // unit that is updated by segments is gathered by them.
  void gather_for_next_step() {
    for (; !next_step_.empty(); next_step_.pop_front()) {
      const PlannedGather& next = next_step_.front();
      if (next.after > turns_done_) return;
      for (int segment : std::exchange(updated_[next.unit], {})) {
        gather(next, segment, true);
        gathered_[next.unit] += std::ssize(segments_of(layout_.units[next.unit], segment));
      }
      if (gathered_[next.unit] < std::ssize(layout_.units[next.unit].segments)) return;
    }
  }

  void collect_loss() {
    Regions sums{{RegionKind::kValidCount}};
    for (int m = 0; m < policy_.micro_batches; ++m) sums.push_back({RegionKind::kLossSum, m});
    add(operation(OpKind::kCollectLoss, StreamId::kReduce), sums, {{RegionKind::kLossTotal}});
    if (schedule_.world() > 1) sum_over_ranks(OpKind::kAllReduceLoss, RegionKind::kLossTotal);
    if (!policy_.clip)
      add(operation(OpKind::kGate, StreamId::kReduce), {{RegionKind::kLossTotal}}, {{RegionKind::kGate}});
  }

  void reduce(int turn) {
    const auto [kind, unit, segment, micro_batch, gradients] = turns_[turn];
    if (!is_last(micro_batch) && adds_unreduced()) return;
    const int slot = sharded() ? shard_slot(unit) : gradients_.slot_of_turn[turn];
    const Regions shard = of_slot(RegionKind::kGradientShard, slot, unit, segment);
    if (sharded()) reduce_scatter(turn, slot, shard);
    if (!is_last(micro_batch)) return;
    if (replicated()) {
      Operation sum = operation(OpKind::kAllReduceGradient, StreamId::kReplicate, unit, segment);
      sum.shard_slot = slot;
      add(std::move(sum), shard, shard);
    }
    Operation norm = operation(OpKind::kSquareNorm, StreamId::kUpdate, unit, segment);
    norm.shard_slot = slot;
    add(std::move(norm), shard, of_unit(RegionKind::kNormPartial, unit, segment));
    shard_slot_of_update_[unit] = slot;
    if (policy_.clip) return;
    // Without sharding passes read the very weights that updates write, and the head has a pass to come.
    if (!sharded() && policy_.split_head && kind == OpKind::kHeadLoss)
      held_updates_.push_back(segment);
    else
      update(unit, segment);
  }

  void reduce_scatter(int turn, int shard_slot, const Regions& shard) {
    const auto [kind, unit, segment, micro_batch, gradients] = turns_[turn];
    const int slot = gradients_.slot_of_turn[turn];
    const auto on_reduce = [&](OpKind what) {
      return operation(what, StreamId::kReduce, turns_[turn].unit, turns_[turn].segment,
                       turns_[turn].micro_batch);
    };
    Regions source = of_slot(RegionKind::kGradientSlot, slot, unit, segment);
    if (schedule_.reduce_type != DType::kFp32) {
      Operation cast = on_reduce(OpKind::kCast);
      cast.gradient_slot = slot;
      add(std::move(cast), source, {{RegionKind::kWireSlot}});
      source = {{RegionKind::kWireSlot}};
    }
    Operation reduce = on_reduce(OpKind::kReduceScatter);
    if (schedule_.reduce_type == DType::kFp32) reduce.gradient_slot = slot;
    if (!reduces_apart()) {
      reduce.shard_slot = shard_slot;
      return add(std::move(reduce), source, shard);
    }
    add(std::move(reduce), source, {{RegionKind::kReducedPiece}});
    Operation put = on_reduce(OpKind::kAccumulate);
    put.shard_slot = shard_slot;
    put.accumulate = micro_batch > 0 && policy_.reduce_every_micro_batch;
    Regions reads{{RegionKind::kReducedPiece}};
    if (put.accumulate) reads = join(std::move(reads), shard);
    add(std::move(put), std::move(reads), shard);
  }

  void collect_norm() {
    Regions partials;
    for (int unit = 0; unit < units_; ++unit)
      partials = join(std::move(partials), of_unit(RegionKind::kNormPartial, unit, -1));
    add(operation(OpKind::kCollectNorm, StreamId::kUpdate), partials, {{RegionKind::kNormTotal}});
    if (sharded()) sum_over_ranks(OpKind::kAllReduceNorm, RegionKind::kNormTotal);
    add(operation(OpKind::kClip, StreamId::kUpdate), {{RegionKind::kNormTotal}}, {{RegionKind::kClip}});
  }

  void update(int unit, int segment) {
    Operation update = operation(OpKind::kUpdate, StreamId::kUpdate, unit, segment);
    update.shard_slot = shard_slot_of_update_.at(unit);
    const Regions state = join(of_unit(RegionKind::kOptimizerShard, unit, segment),
                               of_unit(RegionKind::kParameterShard, unit, segment));
    Regions reads = join(of_slot(RegionKind::kGradientShard, update.shard_slot, unit, segment), state);
    reads.push_back({policy_.clip ? RegionKind::kClip : RegionKind::kGate});
    add(std::move(update), std::move(reads), state);
    updated_[unit].push_back(segment);
    gather_for_next_step();
  }

  // The gradients are read too where they have to last.
  Regions read_back_regions() const {
    Regions regions{{RegionKind::kLossTotal}, {RegionKind::kClip}};
    if (!policy_.clip) regions.push_back({RegionKind::kGate});
    if (policy_.keep_gradients)
      for (const auto& [unit, slot] : shard_slot_of_update_)
        regions = join(std::move(regions), of_slot(RegionKind::kGradientShard, slot, unit, -1));
    return regions;
  }

  const Layout& layout_;
  const Program& program_;
  const Policy& policy_;
  int units_ = 0;
  std::vector<Turn> turns_;
  PlaceParts parts_, shard_parts_;  // of slots
  Schedule schedule_;
  WeightPlan weights_;
  GradientPlan gradients_;
  int shard_slots_ = 0;
  std::map<int, int> shard_slot_of_unit_;    // by unit, while sharded
  std::map<int, int> shard_slot_of_update_;  // by unit
  std::vector<int> held_updates_;  // segments of the head, until the gradient of its input is computed
  std::map<int, std::vector<int>> updated_;  // by unit: segments that are not gathered yet
  std::map<int, int64_t> gathered_;          // by unit: number of segments
  std::deque<PlannedGather> next_step_;      // not issued yet
  int turns_done_ = -1;
  size_t gathers_done_ = 0;  // of weights_.this_step
};

}  // namespace

Schedule build_schedule(const Layout& layout, const Program& program, const Policy& policy) {
  if (layout.world > 1)
    check_slots("weight_slots", policy.weight_slots, 2, "one block is gathered while another computes");
  check_slots("gradient_slots", policy.gradient_slots, 1, "gradients need a place before they are reduced");
  if (layout.units.size() < 2)
    throw InternalError("build_schedule: " + std::to_string(layout.units.size()) +
                        " units; at least an embedding and a head are needed");
  if (policy.replicas < 1 || policy.micro_batches < 1 || policy.deferred_blocks < 0 ||
      (!policy.recompute.empty() && policy.recompute.size() != layout.units.size()))
    throw InternalError("build_schedule: " + std::to_string(policy.replicas) + " replicas, " +
                        std::to_string(policy.micro_batches) + " micro-batches, " +
                        std::to_string(policy.deferred_blocks) + " deferred blocks, recompute for " +
                        std::to_string(policy.recompute.size()) + " of " +
                        std::to_string(layout.units.size()) + " units");
  if (!policy.recompute.empty() && (policy.recompute.front() || policy.recompute.back()))
    throw InternalError("build_schedule: only blocks are computed again, not the embedding or the head");
  if (policy.split_head && layout.units.back().segments.size() > 2)
    throw InternalError("build_schedule: the head has " +
                        std::to_string(layout.units.back().segments.size()) +
                        " segments; a head that is split has one, or two");
  return Builder(layout, program, policy).build();
}

}  // namespace minillm::shard
