#include "shard/fsdp2.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/error.h"
#include "fixtures.h"
#include "shard/hazards.h"
#include "shard/waits.h"

namespace minillm::shard {
namespace {

// What an operation waits for: of the step before when steps_back is 1.
std::string waits_of(const std::vector<Wait>& waits, const Schedule& schedule,
                     const std::vector<std::string>& names) {
  std::string text;
  for (const Wait& wait : waits) {
    text += text.empty() ? " | after " : ", ";
    text += describe(schedule.operations[static_cast<size_t>(wait.operation)], names);
    if (wait.steps_back > 0) text += " of the step before";
  }
  return text;
}

std::string listing(const Schedule& schedule, const std::vector<std::string>& names) {
  const auto waits = derive_waits(schedule);
  std::string text = "\n";
  for (size_t i = 0; i < waits.size(); ++i)
    text += std::string(name_of(schedule.operations[i].stream)) + ": " +
            describe(schedule.operations[i], names) + waits_of(waits[i], schedule, names) + "\n";
  return text;
}

TEST(Fsdp2, ListingOfAStep) {
  const Layout layout = make_layout(make_units(2), 2);
  EXPECT_EQ(listing(build_fsdp2(layout, {}).schedule, layout.unit_names()), R"(
compute: upload
copy: copy in embedding | after upload
copy: copy in head
gather: gather embedding | after copy in head
gather: gather head
compute: copy out embedding | after gather head
compute: copy out head
compute: forward embedding
copy: copy in block0
gather: gather block0 | after copy in block0
compute: copy out block0 | after gather block0
compute: forward block0
copy: copy in block1 | after copy out head
gather: gather block1 | after copy in block1
compute: copy out block1 | after gather block1
compute: forward block1
compute: loss head
copy: copy in block1 | after copy out block1
gather: gather block1 | after copy in block1
compute: copy out block1 | after gather block1
copy: copy in block0 | after copy out block1
gather: gather block0 | after copy in block0
compute: backward block1
compute: reduce copy in block1
reduce: reduce-scatter block1 | after reduce copy in block1
compute: copy out block0 | after gather block0
compute: backward block0
compute: reduce copy in block0 | after reduce-scatter block1
reduce: reduce-scatter block0 | after reduce copy in block0
compute: backward embedding
compute: reduce copy in embedding | after reduce-scatter block0
compute: reduce copy in head
reduce: reduce-scatter embedding | after reduce copy in head
reduce: reduce-scatter head
compute: update embedding | after reduce-scatter head
compute: update block0
compute: update block1
compute: update head
compute: read back
)");
}

TEST(Fsdp2, ListingOfASingleRankWithClippingAndTwoMicroBatches) {
  const Layout layout = make_layout(make_units(1), 1);
  const Fsdp2 step = build_fsdp2(layout, {.micro_batches = 2, .clip = true});
  EXPECT_EQ(listing(step.schedule, layout.unit_names()), R"(
compute: upload
compute: copy out embedding
compute: copy out head
compute: forward embedding
compute: copy out block0
compute: forward block0
compute: loss head
compute: copy out block0
compute: backward block0
compute: reduce copy in block0
reduce: accumulate block0 | after reduce copy in block0
compute: backward embedding
compute: reduce copy in embedding | after accumulate block0
compute: reduce copy in head
reduce: accumulate embedding | after reduce copy in head
reduce: accumulate head
compute: copy out embedding of micro-batch 1 | after accumulate head
compute: copy out head of micro-batch 1
compute: forward embedding of micro-batch 1
compute: copy out block0 of micro-batch 1
compute: forward block0 of micro-batch 1
compute: loss head of micro-batch 1
compute: copy out block0 of micro-batch 1
compute: backward block0 of micro-batch 1
compute: reduce copy in block0 of micro-batch 1
reduce: accumulate block0 of micro-batch 1 | after reduce copy in block0 of micro-batch 1
reduce: accumulate block0 of micro-batch 1, added
compute: backward embedding of micro-batch 1
compute: reduce copy in embedding of micro-batch 1 | after accumulate block0 of micro-batch 1
compute: reduce copy in head of micro-batch 1
reduce: accumulate embedding of micro-batch 1 | after reduce copy in head of micro-batch 1
reduce: accumulate head of micro-batch 1
reduce: accumulate embedding of micro-batch 1, added
reduce: accumulate head of micro-batch 1, added
compute: square norm embedding | after accumulate head of micro-batch 1, added
compute: square norm block0
compute: square norm head
compute: collect norm
compute: clip
compute: update embedding
compute: update block0
compute: update head
compute: read back
)");
}

// The waits that FSDP2 has, written down rule by rule from what its hooks do, by operation.
class ExpectedWaits {
 public:
  ExpectedWaits(const Schedule& schedule, int blocks)
      : schedule_(schedule), blocks_(blocks), head_(blocks + 1) {
    waits_.resize(schedule.operations.size());
    for (int m = 0; m < schedule.micro_batches; ++m) {
      micro_batch_ = m;
      forward();
      backward();
    }
    finish();
  }
  const std::vector<std::set<Wait>>& waits() const { return waits_; }

 private:
  using Match = std::pair<OpKind, int>;  // kind and unit, in the current micro-batch

  int find(Match match, int which = 0) const {
    const auto& operations = schedule_.operations;
    for (size_t i = 0; i < operations.size(); ++i)
      if (Match(operations[i].kind, operations[i].unit) == match &&
          operations[i].micro_batch == micro_batch_ && which-- == 0)
        return static_cast<int>(i);
    ADD_FAILURE() << "no " << name_of(match.first) << " of unit " << match.second << " in micro-batch "
                  << micro_batch_;
    return 0;
  }
  void expect(int operation, int waited_for) {
    waits_[static_cast<size_t>(operation)].insert({waited_for, 0});
  }
  int reduced(int unit) const {  // the last operation of a unit's reduction
    if (schedule_.replicas > 1 && micro_batch_ == 0) return find({OpKind::kAllReduceGradient, unit});
    if (micro_batch_ > 0) return find({OpKind::kAccumulate, unit});
    return find({OpKind::kReduceScatter, unit});
  }

  // Copy-out of a unit waits for its gather, which waits for its copy-in; the `which`-th of the micro-batch.
  void expect_gather(int first_unit, int last_unit, int which) {
    expect(find({OpKind::kGather, first_unit}, which), find({OpKind::kCopyIn, last_unit}, which));
    expect(find({OpKind::kCopyOut, first_unit}, which), find({OpKind::kGather, last_unit}, which));
  }

  void forward() {
    // The root's copy-in waits for what is enqueued before the forward pass: the upload, which follows the
    // optimizer of the step before, or the reductions of the micro-batch before.
    const int root_copy_in = find({OpKind::kCopyIn, 0});
    if (micro_batch_ == 0) {
      expect(root_copy_in, find({OpKind::kUpload, -1}));
    } else {
      --micro_batch_;
      const int before = reduced(head_);
      ++micro_batch_;
      expect(root_copy_in, before);
    }
    expect_gather(0, head_, 0);
    for (int unit = 1; unit <= blocks_; ++unit) {
      expect_gather(unit, unit, 0);
      // The buffer of the last unit but one is free once it has been copied out.
      if (unit == 2) expect(find({OpKind::kCopyIn, unit}), find({OpKind::kCopyOut, head_}));
      if (unit > 2) expect(find({OpKind::kCopyIn, unit}), find({OpKind::kCopyOut, unit - 2}));
    }
  }

  void backward() {
    for (int unit = blocks_; unit >= 1; --unit) {
      expect_gather(unit, unit, 1);
      // One gather in flight: after the copy-out of the unit before it.
      const bool last = unit == blocks_;
      expect(find({OpKind::kCopyIn, unit}, 1),
             find({OpKind::kCopyOut, last ? unit : unit + 1}, last ? 0 : 1));
    }
    for (int unit = blocks_; unit >= 0; --unit) {
      const int copy_in = find({OpKind::kReduceCopyIn, unit});
      // One input of a reduction alive.
      if (unit < blocks_) expect(copy_in, find({OpKind::kReduceScatter, unit + 1}));
      const int copied = unit == 0 ? find({OpKind::kReduceCopyIn, head_}) : copy_in;
      const int reduce = find({OpKind::kReduceScatter, unit});
      expect(reduce, copied);
      if (schedule_.replicas > 1) {
        const int scattered = unit == 0 ? find({OpKind::kReduceScatter, head_}) : reduce;
        expect(find({OpKind::kAllReduceGradient, unit}), scattered);
      }
    }
  }

  // Whatever follows the backward pass waits for the last reduction.
  void finish() {
    const int last = reduced(head_);
    micro_batch_ = 0;
    const bool clip = std::any_of(schedule_.operations.begin(), schedule_.operations.end(),
                                  [](const Operation& o) { return o.kind == OpKind::kClip; });
    expect(find({clip ? OpKind::kSquareNorm : OpKind::kUpdate, 0}), last);
    if (!clip) return;
    expect(find({OpKind::kAllReduceNorm, -1}), find({OpKind::kCollectNorm, -1}));
    expect(find({OpKind::kClip, -1}), find({OpKind::kAllReduceNorm, -1}));
  }

  const Schedule& schedule_;
  const int blocks_, head_;
  int micro_batch_ = 0;
  std::vector<std::set<Wait>> waits_;
};

struct Case {
  int blocks = 0, world = 1;
  Fsdp2Options options;

  std::string name() const {
    return std::to_string(blocks) + " blocks, world " + std::to_string(world) + " x " +
           std::to_string(options.replicas) + ", " + std::to_string(options.micro_batches) +
           " micro-batches" + (options.clip ? ", clip" : "");
  }
  Fsdp2 build() const { return build_fsdp2(make_layout(make_units(blocks), world), options); }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (int blocks : {0, 1, 2, 3, 4, 7, 12})
    for (int world : {1, 2, 4})
      for (int replicas : {1, 2})
        for (int micro_batches : {1, 3})
          for (bool clip : {false, true})
            cases.push_back(
                {blocks, world, {.replicas = replicas, .micro_batches = micro_batches, .clip = clip}});
  return cases;
}

void expect_same_waits(const Schedule& schedule, int blocks) {
  const auto derived = derive_waits(schedule);
  const ExpectedWaits expected(schedule, blocks);
  for (size_t i = 0; i < derived.size(); ++i) {
    const std::vector<Wait> listed(expected.waits()[i].begin(), expected.waits()[i].end());
    EXPECT_EQ(std::set<Wait>(derived[i].begin(), derived[i].end()), expected.waits()[i])
        << describe(schedule.operations[i], {}) << ": derived" << waits_of(derived[i], schedule, {})
        << "; expected" << waits_of(listed, schedule, {});
  }
}

TEST(Fsdp2, WaitsAreThoseOfFsdp2AndNoOthers) {
  for (const Case& c : all_cases()) {
    if (c.world == 1) continue;  // nothing to gather: see the listing
    SCOPED_TRACE(c.name());
    expect_same_waits(c.build().schedule, c.blocks);
  }
}

// Without the buffers that stand for events, only data orders: the waits that FSDP2 adds are gone.
TEST(Fsdp2, EventsMakeWaitsThatDataDoesNot) {
  const Case c{.blocks = 4, .world = 2, .options = {}};
  Fsdp2 step = c.build();
  const ExpectedWaits with_events(step.schedule, c.blocks);
  for (Operation& operation : step.schedule.operations)
    for (auto* regions : {&operation.reads, &operation.writes})
      std::erase_if(*regions, [&](const Region& region) {
        return region.kind == RegionKind::kBuffer &&
               step.buffers[static_cast<size_t>(region.index)].name.ends_with(" state");
      });
  const auto without_events = derive_waits(step.schedule);
  int lost = 0;
  for (size_t i = 0; i < without_events.size(); ++i) {
    const OpKind kind = step.schedule.operations[i].kind;
    for (const Wait& wait : with_events.waits()[i])
      if (std::ranges::find(without_events[i], wait) == without_events[i].end()) {
        EXPECT_TRUE(kind == OpKind::kCopyIn || kind == OpKind::kReduceCopyIn) << name_of(kind);
        ++lost;
      }
  }
  EXPECT_EQ(lost, 1 + 3 + 4 + 4) << "root, forward, backward, reductions";
}

TEST(Fsdp2, NothingIsUnordered) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(c.name());
    const Schedule schedule = c.build().schedule;
    EXPECT_TRUE(find_hazards(schedule, derive_waits(schedule)).empty());
  }
}

TEST(Fsdp2, WhatIsReadHasBeenWritten) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(c.name());
    const Fsdp2 step = c.build();
    std::set<int> written, of_the_step_before;
    for (const Operation& operation : step.schedule.operations) {
      for (const Region& region : operation.reads)
        if (region.kind == RegionKind::kBuffer && !written.contains(region.index))
          of_the_step_before.insert(region.index);
      for (const Region& region : operation.writes)
        if (region.kind == RegionKind::kBuffer) written.insert(region.index);
    }
    for (int index : of_the_step_before) {
      const BufferSpec& buffer = step.buffers[static_cast<size_t>(index)];
      EXPECT_TRUE(written.contains(index)) << buffer.name << " is written by nobody";
      EXPECT_TRUE(buffer.purpose == Purpose::kParameters || buffer.purpose == Purpose::kMoments ||
                  buffer.name.ends_with(" state"))
          << buffer.name << " does not outlive the step";
    }
  }
}

TEST(Fsdp2, EveryWaitIsNeeded) {
  const Schedule schedule =
      Case{.blocks = 3, .world = 2, .options = {.replicas = 2, .micro_batches = 2, .clip = true}}
          .build()
          .schedule;
  const auto waits = derive_waits(schedule);
  for (size_t i = 0; i < waits.size(); ++i)
    for (size_t j = 0; j < waits[i].size(); ++j) {
      auto fewer = waits;
      fewer[i].erase(fewer[i].begin() + static_cast<std::ptrdiff_t>(j));
      EXPECT_FALSE(find_hazards(schedule, fewer).empty()) << describe(schedule.operations[i], {});
    }
}

TEST(Fsdp2, RefusesWhatHasNoMeaning) {
  const Layout layout = make_layout(make_units(1), 2);
  EXPECT_THROW(build_fsdp2(make_layout({{"u", {{"w", {1}}}}}, 1), {}), InternalError);
  EXPECT_THROW(build_fsdp2(layout, {.replicas = 0}), InternalError);
  try {
    build_fsdp2(layout, {.micro_batches = 0});
    FAIL() << "no error";
  } catch (const InternalError& error) {
    EXPECT_STREQ(error.what(), "build_fsdp2: 0 micro-batches; 1 or more are needed");
  }
}

}  // namespace
}  // namespace minillm::shard
