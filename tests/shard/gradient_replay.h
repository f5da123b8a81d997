// What gradient slots, shard slots and the slots of the reduction hold. Internal to slot_replay.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "replay_base.h"

namespace minillm::shard {

enum class Stage : uint8_t { kFree, kMaking, kMade, kReduced, kSummed, kNormed, kUpdated };

// One segment of a unit's gradients.
struct Part {
  Stage stage = Stage::kFree;
  unsigned micro_batches = 0;  // bit by bit: those that are in it
};
struct GradientPlace {
  int unit = -1;
  std::vector<Part> parts;
};
class GradientReplay : protected ReplayBase {
 protected:
  GradientReplay(const Schedule& schedule, const Layout& layout, const Policy& policy)
      : ReplayBase(schedule, layout, policy),
        gradients_(schedule.gradient_slots.size()),
        shards_(schedule.shard_slots.size()) {}

  // The place of a unit's segment, which has to be free to be written anew.
  Part& claim(GradientPlace& place, const Operation& op, int segment) {
    const auto is_free = [&](const Part& part) {
      return part.stage == Stage::kFree || (part.stage == Stage::kUpdated && !policy_.keep_gradients);
    };
    if (place.unit != op.unit) {
      expect(std::all_of(place.parts.begin(), place.parts.end(), is_free), "overwrites what is still needed");
      place = {op.unit, std::vector<Part>(layout_.units[op.unit].segments.size())};
    }
    Part& part = place.parts[static_cast<size_t>(segment)];
    expect(is_free(part), "overwrites what is still needed");
    return part = {};
  }

  Part& find(GradientPlace& place, const Operation& op, int segment) const {
    expect(place.unit == op.unit, "the slot holds another unit");
    return place.parts[static_cast<size_t>(segment)];
  }

  GradientPlace& place_of(std::vector<GradientPlace>& places, const std::vector<Slot>& slots, int slot,
                          int64_t elements) const {
    expect(slot >= 0 && slot < std::ssize(slots), "has no slot");
    expect(slots[static_cast<size_t>(slot)].elements >= elements, "the slot is too short");
    return places[static_cast<size_t>(slot)];
  }
  GradientPlace& gradient_slot(const Operation& op) {
    return place_of(gradients_, schedule_.gradient_slots, op.gradient_slot,
                    layout_.units[op.unit].padded_elements);
  }
  GradientPlace& shard_slot(const Operation& op) {
    return place_of(shards_, schedule_.shard_slots, op.shard_slot, layout_.units[op.unit].shard_elements);
  }

  void make(const Operation& op) {
    GradientPlace& place = sharded() ? gradient_slot(op) : shard_slot(op);
    const unsigned bit = 1u << op.micro_batch;
    for (int segment : segments(op.unit, op.segment)) {
      const bool starts = op.kind != OpKind::kBackwardWeight && !op.accumulate;
      Part& part = starts ? claim(place, op, segment) : find(place, op, segment);
      if (op.kind == OpKind::kBackwardWeight) {
        expect(part.stage == Stage::kMaking, "no gradients were begun");
      } else {
        expect(op.accumulate == (op.micro_batch > 0 && adds_unreduced()), "adds, or fails to");
        expect(starts || (part.stage == Stage::kMade && part.micro_batches == bit - 1),
               "the gradients of earlier micro-batches are not there");
        part.micro_batches |= bit;
      }
      const bool of_head = op.unit + 1 == std::ssize(layout_.units);
      part.stage = op.kind == OpKind::kBackwardInput && !of_head ? Stage::kMaking : Stage::kMade;
      const RegionKind kind = sharded() ? RegionKind::kGradientSlot : RegionKind::kGradientShard;
      const int slot = sharded() ? op.gradient_slot : op.shard_slot;
      writes_slot(kind, slot, op.unit, segment);
      if (op.accumulate) reads_slot(kind, slot, op.unit, segment);
    }
  }

  // The micro-batches of gradients that are ready to be moved from `place`, which is free then.
  unsigned take(GradientPlace& place, const Operation& op, int segment) {
    Part& part = find(place, op, segment);
    expect(part.stage == Stage::kMade, "the gradients are not there");
    const unsigned wanted = policy_.reduce_every_micro_batch ? 1u << op.micro_batch : all_;
    expect(part.micro_batches == wanted, "the gradients are of other micro-batches");
    part.stage = Stage::kFree;
    return part.micro_batches;
  }

  void cast_or_reduce(const Operation& op) {
    const UnitLayout& unit = layout_.units[op.unit];
    const bool casts = policy_.reduce_type != DType::kFp32, from_slot = op.kind == OpKind::kCast || !casts;
    GradientPlace& from = from_slot ? gradient_slot(op) : wire_[0];
    for (int segment : segments(op.unit, op.segment)) {
      const unsigned micro_batches = take(from, op, segment);
      if (from_slot)
        reads_slot(RegionKind::kGradientSlot, op.gradient_slot, op.unit, segment);
      else
        reads(RegionKind::kWireSlot);
      if (op.kind == OpKind::kReduceScatter && !reduces_apart()) {
        claim(shard_slot(op), op, segment) = {Stage::kReduced, micro_batches};
        writes_slot(RegionKind::kGradientShard, op.shard_slot, op.unit, segment);
        continue;
      }
      const bool to_wire = op.kind == OpKind::kCast;
      claim((to_wire ? wire_ : piece_)[0], op, segment) = {Stage::kMade, micro_batches};
      expect((to_wire ? schedule_.wire_elements >= unit.padded_elements
                      : schedule_.reduced_elements >= unit.shard_elements),
             "the slot is too short");
      writes(to_wire ? RegionKind::kWireSlot : RegionKind::kReducedPiece);
    }
  }

  void accumulate(const Operation& op) {
    for (int segment : segments(op.unit, op.segment)) {
      const unsigned micro_batches = take(piece_[0], op, segment);
      GradientPlace& place = shard_slot(op);
      expect(op.accumulate == (op.micro_batch > 0 && policy_.reduce_every_micro_batch), "adds, or fails to");
      Part& part = op.accumulate ? find(place, op, segment) : claim(place, op, segment);
      expect(!op.accumulate || (part.stage == Stage::kReduced && part.micro_batches == micro_batches - 1),
             "the gradients of earlier micro-batches are not there");
      part = {Stage::kReduced, part.micro_batches | micro_batches};
      reads(RegionKind::kReducedPiece);
      writes_slot(RegionKind::kGradientShard, op.shard_slot, op.unit, segment);
      if (op.accumulate) reads_slot(RegionKind::kGradientShard, op.shard_slot, op.unit, segment);
    }
  }

  void use_shard(const Operation& op) {
    const Stage reduced = sharded() ? Stage::kReduced : Stage::kMade;
    for (int segment : segments(op.unit, op.segment)) {
      Part& part = find(shard_slot(op), op, segment);
      expect(part.micro_batches == all_, "gradients of some micro-batches are missing");
      reads_slot(RegionKind::kGradientShard, op.shard_slot, op.unit, segment);
      if (op.kind == OpKind::kAllReduceGradient) {
        expect(part.stage == reduced, "the gradients are not reduced, or summed already");
        part.stage = Stage::kSummed;
        writes_slot(RegionKind::kGradientShard, op.shard_slot, op.unit, segment);
      } else if (op.kind == OpKind::kSquareNorm) {
        expect(part.stage == (replicated() ? Stage::kSummed : reduced), "the gradients are not complete");
        part.stage = Stage::kNormed;
        writes(RegionKind::kNormPartial, op.unit, segment);
      } else {
        expect(part.stage == Stage::kNormed, "the gradients are not measured");
        part.stage = Stage::kUpdated;
      }
    }
  }

  // Of the places of shards, all slots and segments that hold something.
  void read_shards() {
    for (size_t slot = 0; slot < shards_.size(); ++slot)
      for (size_t segment = 0; segment < shards_[slot].parts.size(); ++segment)
        reads_slot(RegionKind::kGradientShard, static_cast<int>(slot), shards_[slot].unit,
                   static_cast<int>(segment));
  }

  void end_gradients() {
    for (std::vector<GradientPlace>* places : {&gradients_, &wire_, &piece_, &shards_})
      for (GradientPlace& place : *places)
        for (Part& part : place.parts) {
          expect(part.stage == Stage::kFree || part.stage == Stage::kUpdated, "gradients are left over");
          part = {};
        }
  }

 private:
  std::vector<GradientPlace> gradients_, shards_, wire_{1}, piece_{1};
};

}  // namespace minillm::shard
