#include "slot_replay.h"

#include "gradient_replay.h"
#include "step_counts.h"

namespace minillm::shard {
namespace {

constexpr int kSteps = 3;

struct WeightPlace {
  int unit = -1;
  std::vector<int> steps;  // by segment: the step that the weights are for, -1: none
};
enum class Sum : uint8_t { kNone, kLocal, kGlobal };

class Replay : GradientReplay {
 public:
  Replay(const Schedule& schedule, const Layout& layout, const Policy& policy)
      : GradientReplay(schedule, layout, policy),
        head_(static_cast<int>(layout.units.size()) - 1),
        world_(layout.world * policy.replicas),
        expected_(expected_counts(layout, policy)),
        weights_(schedule.weight_slots.size()) {
    for (const UnitLayout& unit : layout.units) updates_.emplace_back(unit.segments.size(), 0);
  }

  void run() {
    step_ = -1;
    for (index_ = 0; index_ < std::ssize(schedule_.operations); ++index_)
      if (current().next_step) gather(current());
    for (step_ = 0; step_ < kSteps; ++step_) {
      begin_step();
      for (index_ = 0; index_ < std::ssize(schedule_.operations); ++index_) perform(current());
      end_step();
    }
  }

 private:
  // --- the step -------------------------------------------------------------------------------------------

  void begin_step() {
    counts_.clear();
    forwarded_ = 0;
    backward_at_ = recomputed_ = -1;
    micro_batch_ = 0;
    losses_ = 0;
    valid_ = loss_ = norm_ = Sum::kNone;
    gate_ = clip_ = false;
  }

  void end_step() {
    const std::string wrong = difference(counts_, expected_);
    expect(wrong.empty(), wrong);
    end_gradients();
  }

  // --- weights --------------------------------------------------------------------------------------------

  void gather(const Operation& op) {
    const UnitLayout& unit = layout_.units[op.unit];
    WeightPlace& place = weights_.at(static_cast<size_t>(op.weight_slot));
    const Slot& slot = schedule_.weight_slots[static_cast<size_t>(op.weight_slot)];
    expect(slot.group == unit.slot_group && slot.elements >= unit.padded_elements, "the slot does not fit");
    expect(next_reader(op) == op.unit, "gathered for nobody");
    const int wanted = step_ + (op.next_step ? 1 : 0);
    if (place.unit != op.unit) place = {op.unit, std::vector<int>(unit.segments.size(), -1)};
    for (int segment : segments(op.unit, op.segment)) {
      expect(updates_[op.unit][segment] == wanted, "gathers weights of another step");
      for (const WeightPlace& other : weights_)
        expect(other.unit != op.unit || other.steps[segment] != wanted, "is gathered already");
      place.steps[segment] = wanted;
      reads(RegionKind::kParameterShard, op.unit, segment);
      writes_slot(RegionKind::kWeightSlot, op.weight_slot, op.unit, segment);
    }
  }

  // The unit whose weights are read next from the slot, in this step or the one after.
  int next_reader(const Operation& gather) const {
    const auto& list = schedule_.operations;
    for (size_t k = 1; k <= list.size(); ++k) {
      const Operation& op = list[(static_cast<size_t>(index_) + k) % list.size()];
      const bool more_of_it = op.kind == OpKind::kGather && op.unit == gather.unit;
      if (op.weight_slot == gather.weight_slot && !more_of_it)
        return op.kind == OpKind::kGather ? -1 : op.unit;
    }
    return -1;
  }

  void use_weights(const Operation& op) {
    if (op.unit == 0 && op.kind != OpKind::kForward) return;
    if (!sharded()) {
      for (int segment : segments(op.unit, op.kind == OpKind::kBackwardWeight ? op.segment : -1)) {
        expect(updates_[op.unit][segment] == step_, "its weights are updated already");
        reads(RegionKind::kParameterShard, op.unit, segment);
      }
      return;
    }
    expect(op.weight_slot >= 0, "has no weights");
    const WeightPlace& place = weights_.at(static_cast<size_t>(op.weight_slot));
    for (int segment : segments(op.unit, -1)) {
      expect(place.unit == op.unit && place.steps[segment] == step_, "its slot holds other weights");
      reads_slot(RegionKind::kWeightSlot, op.weight_slot, op.unit, segment);
    }
  }

  // --- passes ---------------------------------------------------------------------------------------------

  void check_order(const Operation& op) {
    const int u = op.unit;
    if (op.kind == OpKind::kForward && u == 0 && op.micro_batch > 0) {
      expect(backward_at_ == 0 && op.micro_batch == micro_batch_ + 1, "the micro-batch before is not done");
      micro_batch_ = op.micro_batch;
      forwarded_ = 0;
      backward_at_ = recomputed_ = -1;
    }
    expect(op.micro_batch == micro_batch_, "belongs to another micro-batch");
    switch (op.kind) {
      case OpKind::kForward:
      case OpKind::kHeadLoss:
        expect(u == forwarded_++, "out of the forward order");
        if (u == head_) backward_at_ = policy_.split_head ? head_ + 1 : head_;
        return;
      case OpKind::kRecompute:
        expect(u == backward_at_ - 1, "recomputed out of order");
        recomputed_ = u;
        return;
      case OpKind::kBackwardWeight:
        return expect(backward_at_ >= 0 && backward_at_ <= u, "before the gradient of its input");
      default:
        expect(u == backward_at_ - 1, "out of the backward order");
        expect(!recomputes(u) || recomputed_ == u, "its activations are not recomputed");
        backward_at_ = u;
    }
  }

  void pass(const Operation& op) {
    check_order(op);
    use_weights(op);
    if (op.kind == OpKind::kBackwardInput && op.unit == head_ && op.segment < 0)
      expect(op.gradient_slot < 0 && op.shard_slot < 0 && !op.accumulate, "its gradients are made already");
    else if (makes_gradients(op.kind))
      make(op);
    if (op.kind != OpKind::kHeadLoss) return;
    expect(valid_ == Sum::kGlobal, "the valid targets are not counted");
    losses_ |= 1u << op.micro_batch;
    reads(RegionKind::kValidCount);
    writes(RegionKind::kLossSum, op.micro_batch);
  }

  void update(const Operation& op) {
    expect(counts_.contains({OpKind::kSetStep, -1, -1, 0}), "the scalars of the step are not set");
    expect(policy_.clip ? clip_ : gate_, "its factor is not known");
    reads(policy_.clip ? RegionKind::kClip : RegionKind::kGate);
    for (int segment : segments(op.unit, op.segment)) {
      expect(updates_[op.unit][segment]++ == step_, "updated twice");
      for (const RegionKind kind : {RegionKind::kOptimizerShard, RegionKind::kParameterShard}) {
        reads(kind, op.unit, segment);
        writes(kind, op.unit, segment);
      }
    }
  }

  // --- scalars --------------------------------------------------------------------------------------------

  void sum_over_ranks(Sum& value, RegionKind kind) {
    expect(value == Sum::kLocal, "there is no local value to sum");
    value = Sum::kGlobal;
    reads(kind);
    writes(kind);
  }

  void collect_loss() {
    expect(valid_ == Sum::kGlobal && losses_ == all_, "some micro-batches have no loss yet");
    loss_ = world_ > 1 ? Sum::kLocal : Sum::kGlobal;
    reads(RegionKind::kValidCount);
    for (int m = 0; m < policy_.micro_batches; ++m) reads(RegionKind::kLossSum, m);
    writes(RegionKind::kLossTotal);
  }

  void collect_norm() {
    norm_ = sharded() ? Sum::kLocal : Sum::kGlobal;
    for (int unit = 0; unit <= head_; ++unit)
      for (int segment : segments(unit, -1)) {
        expect(counts_.contains({OpKind::kSquareNorm, unit, segment, 0}), "some gradients are not measured");
        reads(RegionKind::kNormPartial, unit, segment);
      }
    writes(RegionKind::kNormTotal);
  }

  void read_back() {
    expect(loss_ == Sum::kGlobal && clip_, "the results are not there");
    reads(RegionKind::kLossTotal);
    reads(RegionKind::kClip);
    if (!policy_.clip) reads(RegionKind::kGate);
    if (policy_.keep_gradients) read_shards();
  }

  void set(bool& value, RegionKind kind, Sum from, RegionKind of) {
    expect(from == Sum::kGlobal, "what it is made of is not there");
    value = true;
    reads(of);
    writes(kind);
  }

  void perform(const Operation& op) {
    count(op, layout_, counts_);
    switch (op.kind) {
      case OpKind::kUpload:
      case OpKind::kSetStep:
        return;
      case OpKind::kBegin:
        expect(counts_.contains({OpKind::kUpload, -1, -1, 0}), "there are no inputs");
        valid_ = world_ > 1 ? Sum::kLocal : Sum::kGlobal;
        return writes(RegionKind::kValidCount);
      case OpKind::kAllReduceCount:
        return sum_over_ranks(valid_, RegionKind::kValidCount);
      case OpKind::kGather:
        return gather(op);
      case OpKind::kCast:
      case OpKind::kReduceScatter:
        return cast_or_reduce(op);
      case OpKind::kAccumulate:
        return accumulate(op);
      case OpKind::kAllReduceGradient:
      case OpKind::kSquareNorm:
        return use_shard(op);
      case OpKind::kUpdate:
        use_shard(op);
        return update(op);
      case OpKind::kCollectLoss:
        return collect_loss();
      case OpKind::kAllReduceLoss:
        return sum_over_ranks(loss_, RegionKind::kLossTotal);
      case OpKind::kGate:
        return set(gate_, RegionKind::kGate, loss_, RegionKind::kLossTotal);
      case OpKind::kCollectNorm:
        return collect_norm();
      case OpKind::kAllReduceNorm:
        return sum_over_ranks(norm_, RegionKind::kNormTotal);
      case OpKind::kClip:
        return set(clip_, RegionKind::kClip, norm_, RegionKind::kNormTotal);
      case OpKind::kReadBack:
        return read_back();
      default:
        return pass(op);
    }
  }

  const int head_, world_;
  const StepCounts expected_;
  std::vector<WeightPlace> weights_;
  std::vector<std::vector<int>> updates_;  // by unit and segment: how many

  // Of the step in progress.
  StepCounts counts_;
  int micro_batch_ = 0, forwarded_ = 0, backward_at_ = -1, recomputed_ = -1;
  unsigned losses_ = 0;
  Sum valid_ = Sum::kNone, loss_ = Sum::kNone, norm_ = Sum::kNone;
  bool gate_ = false, clip_ = false;
};

}  // namespace

std::string find_fault(const Schedule& schedule, const Layout& layout, const Policy& policy) {
  try {
    Replay(schedule, layout, policy).run();
  } catch (const std::runtime_error& fault) {
    return fault.what();
  }
  return "";
}

}  // namespace minillm::shard
