// The builder's schedules in words.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"
#include "fixtures.h"
#include "shard/builder.h"

namespace minillm::shard {
namespace {

std::string listing(const std::vector<UnitSpec>& units, int world, const Policy& policy) {
  const Layout layout = make_layout(units, world);
  std::string text = "\n";
  for (const Operation& operation : build_schedule(layout, DeclaredProgram(), policy).operations)
    text += std::string(name_of(operation.stream)) + ": " + describe(operation, layout.unit_names()) + "\n";
  return text;
}

TEST(Builder, ListingOfAShardedStepWithADeferredBlock) {
  EXPECT_EQ(listing(make_segmented_units(3), 2, {.deferred_blocks = 1}), R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 2)
gather: gather head -> weight slot 2
compute: forward block0 (weight slot 0)
gather: gather block2 -> weight slot 0
compute: forward block1 (weight slot 1)
compute: forward block2 (weight slot 0)
compute: loss head (weight slot 2) -> gradient slot 0
reduce: collect loss
reduce: all-reduce loss
reduce: gate
reduce: reduce-scatter head <- gradient slot 0 -> shard slot 0
update: square norm head (shard slot 0)
update: update head (shard slot 0)
compute: backward block2 (weight slot 0) -> gradient slot 1
gather: gather block0 -> weight slot 0
reduce: reduce-scatter block2 <- gradient slot 1 -> shard slot 1
update: square norm block2 (shard slot 1)
update: update block2 (shard slot 1)
compute: backward block1 (weight slot 1) -> gradient slot 0
reduce: reduce-scatter block1 <- gradient slot 0 -> shard slot 0
update: square norm block1 (shard slot 0)
update: update block1 (shard slot 0)
compute: backward input block0 (weight slot 0) -> gradient slot 2
compute: backward embedding -> gradient slot 3
reduce: reduce-scatter embedding <- gradient slot 3 -> shard slot 1
update: square norm embedding (shard slot 1)
update: update embedding (shard slot 1)
gather: gather embedding -> weight slot 2, for the next step
compute: backward weight block0 segment 0 (weight slot 0) -> gradient slot 2
reduce: reduce-scatter block0 segment 0 <- gradient slot 2 -> shard slot 0
update: square norm block0 segment 0 (shard slot 0)
update: update block0 segment 0 (shard slot 0)
compute: backward weight block0 segment 1 (weight slot 0) -> gradient slot 2
gather: gather block0 segment 0 -> weight slot 0, for the next step
reduce: reduce-scatter block0 segment 1 <- gradient slot 2 -> shard slot 0
update: square norm block0 segment 1 (shard slot 0)
update: update block0 segment 1 (shard slot 0)
gather: gather block0 segment 1 -> weight slot 0, for the next step
gather: gather block1 -> weight slot 1, for the next step
update: collect norm
reduce: all-reduce norm
update: clip
update: read back
)");
}

// The gradients of the head's weight are reduced while that of its input is computed; nothing more is
// gathered, reduced or updated than without.
TEST(Builder, ListingOfAStepThatSplitsTheHead) {
  EXPECT_EQ(listing(make_units(1), 2, {.split_head = true}), R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 (weight slot 0)
compute: loss head segment 0 (weight slot 1) -> gradient slot 0
reduce: collect loss
reduce: all-reduce loss
reduce: gate
reduce: reduce-scatter head segment 0 <- gradient slot 0 -> shard slot 0
update: square norm head segment 0 (shard slot 0)
update: update head segment 0 (shard slot 0)
compute: backward input head (weight slot 1)
compute: backward block0 (weight slot 0) -> gradient slot 1
reduce: reduce-scatter block0 <- gradient slot 1 -> shard slot 1
update: square norm block0 (shard slot 1)
update: update block0 (shard slot 1)
compute: backward embedding -> gradient slot 0
reduce: reduce-scatter embedding <- gradient slot 0 -> shard slot 0
update: square norm embedding (shard slot 0)
update: update embedding (shard slot 0)
gather: gather embedding -> weight slot 1, for the next step
gather: gather block0 -> weight slot 0, for the next step
update: collect norm
reduce: all-reduce norm
update: clip
update: read back
)");
}

// The final norm's gradient is known after the head's other one.
TEST(Builder, ASplitHeadOfTwoSegmentsIsReducedInTwoParts) {
  const std::string text = listing(make_units_with_norm(1), 2, {.split_head = true, .micro_batches = 2});
  const auto expect_in_order = [&](const std::vector<std::string>& lines) {
    size_t at = 0;
    for (const std::string& line : lines) {
      at = text.find("\n" + line + "\n", at);
      ASSERT_NE(at, std::string::npos) << line << " in" << text;
    }
  };
  expect_in_order(
      {"compute: loss head segment 1 (weight slot 1) -> gradient slot 0",
       "reduce: reduce-scatter head segment 1 <- gradient slot 0",
       "reduce: accumulate head segment 1 -> shard slot 2",
       "compute: backward input head segment 0 (weight slot 1) -> gradient slot 0",
       "reduce: reduce-scatter head segment 0 <- gradient slot 0",
       "reduce: accumulate head segment 0 -> shard slot 2",
       "compute: backward block0 (weight slot 0) -> gradient slot 1",
       "compute: loss head segment 1 of micro-batch 1 (weight slot 1) -> gradient slot 1",
       "reduce: collect loss", "reduce: accumulate head segment 1 of micro-batch 1 -> shard slot 2, added",
       "update: update head segment 1 (shard slot 2)",
       "compute: backward input head segment 0 of micro-batch 1 (weight slot 1) -> gradient slot 1",
       "reduce: accumulate head segment 0 of micro-batch 1 -> shard slot 2, added",
       "update: update head segment 0 (shard slot 2)",
       "compute: backward block0 of micro-batch 1 (weight slot 0) -> gradient slot 0"});
  std::vector<UnitSpec> three = make_units_with_norm(1);
  three.back().tensors.push_back({"bias", {7}, 0, 2});
  EXPECT_THROW(listing(three, 2, {.split_head = true}), InternalError);
}

TEST(Builder, ListingOfASingleRank) {
  EXPECT_EQ(listing(make_units(1), 1, {}), R"(
compute: upload
compute: begin
update: set step
compute: forward embedding
compute: forward block0
compute: loss head -> shard slot 0
reduce: collect loss
reduce: gate
update: square norm head (shard slot 0)
update: update head (shard slot 0)
compute: backward block0 -> shard slot 1
update: square norm block0 (shard slot 1)
update: update block0 (shard slot 1)
compute: backward embedding -> shard slot 0
update: square norm embedding (shard slot 0)
update: update embedding (shard slot 0)
update: collect norm
update: clip
update: read back
)");
}

TEST(Builder, ListingOfAStepThatClips) {
  EXPECT_EQ(listing(make_units(1), 2, {.clip = true}), R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 (weight slot 0)
compute: loss head (weight slot 1) -> gradient slot 0
reduce: collect loss
reduce: all-reduce loss
reduce: reduce-scatter head <- gradient slot 0 -> shard slot 2
update: square norm head (shard slot 2)
compute: backward block0 (weight slot 0) -> gradient slot 1
reduce: reduce-scatter block0 <- gradient slot 1 -> shard slot 1
update: square norm block0 (shard slot 1)
compute: backward embedding -> gradient slot 0
reduce: reduce-scatter embedding <- gradient slot 0 -> shard slot 0
update: square norm embedding (shard slot 0)
update: collect norm
reduce: all-reduce norm
update: clip
update: update embedding (shard slot 0)
gather: gather embedding -> weight slot 1, for the next step
update: update block0 (shard slot 1)
gather: gather block0 -> weight slot 0, for the next step
update: update head (shard slot 2)
update: read back
)");
}

TEST(Builder, ListingOfHybridShardingWithAccumulation) {
  EXPECT_EQ(listing(make_units(1), 2, {.replicas = 2, .micro_batches = 2, .reduce_type = DType::kBf16}), R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 (weight slot 0)
compute: loss head (weight slot 1) -> gradient slot 0
gather: gather embedding -> weight slot 1
reduce: cast head <- gradient slot 0
reduce: reduce-scatter head
reduce: accumulate head -> shard slot 2
compute: backward block0 (weight slot 0) -> gradient slot 1
reduce: cast block0 <- gradient slot 1
reduce: reduce-scatter block0
reduce: accumulate block0 -> shard slot 1
compute: backward embedding -> gradient slot 0
reduce: cast embedding <- gradient slot 0
reduce: reduce-scatter embedding
reduce: accumulate embedding -> shard slot 0
compute: forward embedding of micro-batch 1 (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 of micro-batch 1 (weight slot 0)
compute: loss head of micro-batch 1 (weight slot 1) -> gradient slot 1
reduce: collect loss
reduce: all-reduce loss
reduce: gate
reduce: cast head of micro-batch 1 <- gradient slot 1
reduce: reduce-scatter head of micro-batch 1
reduce: accumulate head of micro-batch 1 -> shard slot 2, added
replicate: all-reduce head (shard slot 2)
update: square norm head (shard slot 2)
update: update head (shard slot 2)
compute: backward block0 of micro-batch 1 (weight slot 0) -> gradient slot 0
reduce: cast block0 of micro-batch 1 <- gradient slot 0
reduce: reduce-scatter block0 of micro-batch 1
reduce: accumulate block0 of micro-batch 1 -> shard slot 1, added
replicate: all-reduce block0 (shard slot 1)
update: square norm block0 (shard slot 1)
update: update block0 (shard slot 1)
compute: backward embedding of micro-batch 1 -> gradient slot 1
reduce: cast embedding of micro-batch 1 <- gradient slot 1
reduce: reduce-scatter embedding of micro-batch 1
reduce: accumulate embedding of micro-batch 1 -> shard slot 0, added
replicate: all-reduce embedding (shard slot 0)
update: square norm embedding (shard slot 0)
update: update embedding (shard slot 0)
gather: gather embedding -> weight slot 1, for the next step
gather: gather block0 -> weight slot 0, for the next step
update: collect norm
reduce: all-reduce norm
update: clip
update: read back
)");
}

TEST(Builder, ListingOfUnreducedAccumulationWithRecomputation) {
  EXPECT_EQ(
      listing(make_units(1), 2,
              {.micro_batches = 2, .reduce_every_micro_batch = false, .recompute = {false, true, false}}),
      R"(
compute: upload
compute: begin
reduce: all-reduce count
update: set step
compute: forward embedding (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 (weight slot 0)
compute: loss head (weight slot 1) -> gradient slot 2
gather: gather embedding -> weight slot 1
compute: recompute block0 (weight slot 0)
compute: backward block0 (weight slot 0) -> gradient slot 1
compute: backward embedding -> gradient slot 0
compute: forward embedding of micro-batch 1 (weight slot 1)
gather: gather head -> weight slot 1
compute: forward block0 of micro-batch 1 (weight slot 0)
compute: loss head of micro-batch 1 (weight slot 1) -> gradient slot 2, added
reduce: collect loss
reduce: all-reduce loss
reduce: gate
reduce: reduce-scatter head of micro-batch 1 <- gradient slot 2 -> shard slot 2
update: square norm head (shard slot 2)
update: update head (shard slot 2)
compute: recompute block0 of micro-batch 1 (weight slot 0)
compute: backward block0 of micro-batch 1 (weight slot 0) -> gradient slot 1, added
reduce: reduce-scatter block0 of micro-batch 1 <- gradient slot 1 -> shard slot 1
update: square norm block0 (shard slot 1)
update: update block0 (shard slot 1)
compute: backward embedding of micro-batch 1 -> gradient slot 0, added
reduce: reduce-scatter embedding of micro-batch 1 <- gradient slot 0 -> shard slot 0
update: square norm embedding (shard slot 0)
update: update embedding (shard slot 0)
gather: gather embedding -> weight slot 1, for the next step
gather: gather block0 -> weight slot 0, for the next step
update: collect norm
reduce: all-reduce norm
update: clip
update: read back
)");
}

}  // namespace
}  // namespace minillm::shard
