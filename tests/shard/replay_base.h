// What the parts of find_fault share: the step in progress, and how a fault is told. Internal to
// slot_replay.cpp.
#pragma once

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "shard/builder.h"
#include "shard/layout.h"
#include "shard/schedule.h"
#include "step_counts.h"

namespace minillm::shard {

class ReplayBase {
 protected:
  ReplayBase(const Schedule& schedule, const Layout& layout, const Policy& policy)
      : schedule_(schedule), layout_(layout), policy_(policy), all_((1u << policy.micro_batches) - 1) {}

  const Operation& current() const { return schedule_.operations[static_cast<size_t>(index_)]; }
  bool sharded() const { return layout_.world > 1; }
  bool replicated() const { return policy_.replicas > 1; }
  bool recomputes(int unit) const { return !policy_.recompute.empty() && policy_.recompute[unit]; }
  bool adds_unreduced() const { return !sharded() || !policy_.reduce_every_micro_batch; }
  bool reduces_apart() const {
    return policy_.reduce_type != DType::kFp32 ||
           (policy_.micro_batches > 1 && policy_.reduce_every_micro_batch);
  }

  void expect(bool holds, const std::string& demand) const {
    if (holds) return;
    const bool inside = index_ < std::ssize(schedule_.operations);
    throw std::runtime_error(
        "step " + std::to_string(step_) +
        (inside ? ", " + std::to_string(index_) + ": '" + describe(current(), {}) + "': " : ", end: ") +
        demand);
  }

  static bool has(const std::vector<Region>& regions, const Region& region) {
    return std::find(regions.begin(), regions.end(), region) != regions.end();
  }
  void reads(RegionKind kind, int index = 0, int part = 0) {
    const Region region{kind, index, part};
    expect(has(current().reads, region), "does not declare that it reads " + describe(region, {}));
  }
  void writes(RegionKind kind, int index = 0, int part = 0) {
    const Region region{kind, index, part};
    expect(has(current().writes, region), "does not declare that it writes " + describe(region, {}));
  }

  // The same of all parts of a slot that a segment of the unit lies in.
  void reads_slot(RegionKind kind, int slot, int unit, int segment) {
    for (int part : parts(kind, unit, segment)) reads(kind, slot, part);
  }
  void writes_slot(RegionKind kind, int slot, int unit, int segment) {
    for (int part : parts(kind, unit, segment)) writes(kind, slot, part);
  }
  // Places are cut where segments begin. So an element is in the part with the number of different beginnings
  // up to it, from 0, and a segment in the parts of all of its elements at which one begins.
  std::vector<int> parts(RegionKind kind, int unit, int segment) const {
    const bool shards = kind == RegionKind::kGradientShard;
    const auto begin_of = [&](const Segment& s) { return shards ? s.shard_offset : s.offset; };
    const Segment& own = layout_.units[unit].segments[static_cast<size_t>(segment)];
    const int64_t end = begin_of(own) + (shards ? own.shard_elements : own.padded_elements);
    std::set<int64_t> before, inside;
    for (const UnitLayout& other : layout_.units)
      for (const Segment& s : other.segments) {
        if (begin_of(s) < begin_of(own)) before.insert(begin_of(s));
        if (begin_of(s) >= begin_of(own) && begin_of(s) < end) inside.insert(begin_of(s));
      }
    std::vector<int> numbers(inside.size());
    std::iota(numbers.begin(), numbers.end(), static_cast<int>(before.size()));
    return numbers;
  }

  std::vector<int> segments(int unit, int segment) const {
    return segment_numbers(layout_.units[unit], segment);
  }

  const Schedule& schedule_;
  const Layout& layout_;
  const Policy& policy_;
  const unsigned all_;  // micro-batches, bit by bit
  int step_ = 0;
  std::ptrdiff_t index_ = 0;  // of the current operation
};

}  // namespace minillm::shard
