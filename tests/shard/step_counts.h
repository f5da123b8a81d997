// How often each operation has to happen in a step, whatever the order.
#pragma once

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "shard/builder.h"
#include "shard/layout.h"
#include "shard/schedule.h"

namespace minillm::shard {

/// Times by kind, unit, segment (-1 for passes over all of them) and micro-batch. Gathers are not counted:
/// they happen as often as weights are missing.
using StepCounts = std::map<std::tuple<OpKind, int, int, int>, int>;

/// The segments that `segment` names: itself, or all of the unit for -1.
inline std::vector<int> segment_numbers(const UnitLayout& unit, int segment) {
  if (segment >= 0) return {segment};
  std::vector<int> all;
  for (int s = 0; s < std::ssize(unit.segments); ++s) all.push_back(s);
  return all;
}

inline void count(const Operation& op, const Layout& layout, StepCounts& counts) {
  if (op.kind == OpKind::kGather) return;
  // What a split head makes in its two parts is told by segment too; -1 is all of it, or none.
  const bool of_head = op.unit + 1 == std::ssize(layout.units) && op.segment >= 0;
  const bool by_segment = op.unit >= 0 && (op.kind >= OpKind::kBackwardWeight || of_head);
  for (int segment : by_segment ? segment_numbers(layout.units[op.unit], op.segment) : std::vector<int>{-1})
    ++counts[{op.kind, op.unit, segment, op.micro_batch}];
}

inline StepCounts expected_counts(const Layout& layout, const Policy& policy) {
  StepCounts counts;
  const auto once = [&](OpKind kind, bool wanted = true, int unit = -1, int segment = -1, int m = 0) {
    if (wanted) counts[{kind, unit, segment, m}] = 1;
  };
  const int head = static_cast<int>(layout.units.size()) - 1;
  const bool sharded = layout.world > 1, replicated = policy.replicas > 1;
  const bool casts = policy.reduce_type != DType::kFp32;
  const bool apart = casts || (policy.micro_batches > 1 && policy.reduce_every_micro_batch);
  for (OpKind kind : {OpKind::kUpload, OpKind::kSetStep, OpKind::kBegin, OpKind::kCollectLoss,
                      OpKind::kCollectNorm, OpKind::kClip, OpKind::kReadBack})
    once(kind);
  once(OpKind::kGate, !policy.clip);
  once(OpKind::kAllReduceCount, sharded || replicated);
  once(OpKind::kAllReduceLoss, sharded || replicated);
  once(OpKind::kAllReduceNorm, sharded);
  for (int m = 0; m < policy.micro_batches; ++m)
    for (int unit = 0; unit <= head; ++unit) {
      const bool last = m + 1 == policy.micro_batches, block = unit > 0 && unit < head;
      const bool splits = last && block && unit <= policy.deferred_blocks;
      const bool reduces = sharded && (last || policy.reduce_every_micro_batch);
      const int last_segment = static_cast<int>(layout.units[unit].segments.size()) - 1;
      once(OpKind::kForward, unit < head, unit, -1, m);
      once(OpKind::kHeadLoss, unit == head, unit, policy.split_head ? last_segment : -1, m);
      once(OpKind::kBackwardInput, unit == head && policy.split_head, unit, last_segment - 1, m);
      once(OpKind::kRecompute, block && !policy.recompute.empty() && policy.recompute[unit], unit, -1, m);
      once(splits ? OpKind::kBackwardInput : OpKind::kBackward, unit < head, unit, -1, m);
      for (int segment : segment_numbers(layout.units[unit], -1)) {
        once(OpKind::kBackwardWeight, splits, unit, segment, m);
        once(OpKind::kCast, reduces && casts, unit, segment, m);
        once(OpKind::kReduceScatter, reduces, unit, segment, m);
        once(OpKind::kAccumulate, reduces && apart, unit, segment, m);
        if (!last) continue;
        once(OpKind::kAllReduceGradient, replicated, unit, segment);
        once(OpKind::kSquareNorm, true, unit, segment);
        once(OpKind::kUpdate, true, unit, segment);
      }
    }
  return counts;
}

/// The first operation that does not happen as often as it has to, as a sentence; empty when there is none.
inline std::string difference(StepCounts found, const StepCounts& expected) {
  for (const auto& [key, times] : expected) found[key] -= times;
  for (const auto& [key, excess] : found) {
    const auto [kind, unit, segment, micro_batch] = key;
    const Operation op{.kind = kind, .unit = unit, .segment = segment, .micro_batch = micro_batch};
    if (excess != 0)
      return std::string(excess > 0 ? "happens too often: '" : "happens too rarely: '")
          .append(describe(op, {}))
          .append("'");
  }
  return "";
}

}  // namespace minillm::shard
