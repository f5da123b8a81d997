// What make_step_plan() chooses by itself: deferred blocks and the head's chunk, both only where free.
#include "train/step_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "core/format.h"
#include "support.h"
#include "tests/unit/errors.h"

namespace minillm::train {
namespace {

using minillm::test::expect_error;
using test::node;
using test::reference;
using test::small;

int64_t bytes_with(const config::Config& config, const World& world, int deferred_blocks) {
  return make_step_plan(config, world, {.deferred_blocks = deferred_blocks}).memory.bytes;
}

// The most that need no more memory than none, up to two; of the chunk that was chosen without.
void expect_free_deferral(const config::Config& config, const World& world, int expected) {
  const StepPlan plan = make_step_plan(config, world);
  EXPECT_EQ(plan.policy.deferred_blocks, expected);
  const int64_t none = bytes_with(plan.config, world, 0);
  EXPECT_LE(plan.memory.bytes, none);
  EXPECT_EQ(plan.memory.bytes, bytes_with(plan.config, world, expected));
  if (world.ranks == 1) return;
  for (int more = expected + 1; more <= std::min<int64_t>(2, config.model.n_layers); ++more)
    EXPECT_GT(bytes_with(plan.config, world, more), none) << more;
}

TEST(StepPlan, DefersBlocksWhereFree) {
  expect_free_deferral(reference(), node(4), 2);
  expect_free_deferral(reference({"memory.recompute=none"}), node(8), 2);
  expect_free_deferral(reference({"parallel.policy=replicate"}), node(4), 2);
}

TEST(StepPlan, DefersOneWhereTwoCost) {
  expect_free_deferral(small({"model.n_layers=2"}), node(4), 1);
}

TEST(StepPlan, DefersNoneWhereThatCosts) {
  expect_free_deferral(small({"model.n_layers=1"}), node(4), 0);
  expect_free_deferral(reference({"memory.recompute=block"}), node(4), 0);
  expect_free_deferral(reference({"train.micro_batch=1", "train.seq_len=128"}), node(4), 0);
  expect_free_deferral(reference(), node(1), 0);
}

TEST(StepPlan, TheGivenDeferralIsTaken) {
  for (int blocks : {0, 1, 2, 3}) {
    const StepPlan plan = make_step_plan(reference(), node(4), {.deferred_blocks = blocks});
    EXPECT_EQ(plan.policy.deferred_blocks, blocks);
    EXPECT_EQ(
        std::ranges::count(plan.schedule.operations, shard::OpKind::kBackwardInput, &shard::Operation::kind),
        blocks);
  }
}

int64_t bytes_of_chunk(const config::Config& config, int64_t rows) {
  config::Config with = config;
  with.train.head_chunk = rows;
  return make_step_plan(with, node(4), {.deferred_blocks = 0}).memory.bytes;
}

// Rows of logits are chosen while nothing is deferred; then 1024 of them cost as much.
TEST(StepPlan, LargerHeadChunksWhereFree) {
  const config::Config config = reference();
  const int64_t chosen = make_step_plan(config, node(4)).config.train.head_chunk;
  EXPECT_GT(chosen, 1024);
  EXPECT_LE(bytes_of_chunk(config, chosen), bytes_of_chunk(config, 1024));
  EXPECT_GT(bytes_of_chunk(config, 2 * chosen), bytes_of_chunk(config, 1024)) << "twice as many are not free";
}

TEST(StepPlan, TheLeastHeadChunkWhereLargerOnesCost) {
  const config::Config config = reference({"model.vocab_size=128000"});
  EXPECT_EQ(make_step_plan(config, node(4)).config.train.head_chunk, 1024);
  EXPECT_GT(bytes_of_chunk(config, 2048), bytes_of_chunk(config, 1024));
}

TEST(StepPlan, HeadChunksAreNoLongerThanTheBatch) {
  const auto chunk = [](const char* key) {
    return make_step_plan(small({"train.micro_batch=1", "train.seq_len=96", key}), node(2))
        .config.train.head_chunk;
  };
  EXPECT_EQ(chunk("train.head_chunk=0"), 96);
  EXPECT_EQ(chunk("train.head_chunk=32"), 32) << "what is given is taken";
}

TEST(StepPlan, SplitsTheHeadWhereItsRowsAreOneChunk) {
  const auto head = [](const std::string& chunk) {
    std::vector<shard::OpKind> kinds;
    const StepPlan plan = make_step_plan(reference({"train.head_chunk=" + chunk}), node(4));
    for (const shard::Operation& operation : plan.schedule.operations)
      if (operation.unit == 13 && operation.stream == shard::StreamId::kCompute)
        kinds.push_back(operation.kind);
    return kinds;
  };
  using Kinds = std::vector<shard::OpKind>;
  EXPECT_EQ(head("8192"), (Kinds{shard::OpKind::kHeadLoss, shard::OpKind::kBackwardInput}));
  EXPECT_EQ(head("8193"), head("8192")) << "more than there are";
  EXPECT_EQ(head("8191"), Kinds{shard::OpKind::kHeadLoss});
}

TEST(StepPlan, DividesTheRanks) {
  const auto divided = [](std::vector<std::string> overrides, World world) {
    const Division division = divide(small(overrides), world);
    return std::pair(division.shards, division.replicas);
  };
  EXPECT_EQ(divided({}, node(6)), std::pair(6, 1));
  EXPECT_EQ(divided({"parallel.policy=grads"}, node(6)), std::pair(6, 1));
  EXPECT_EQ(divided({"parallel.policy=replicate"}, node(6)), std::pair(1, 6));
  EXPECT_EQ(divided({"parallel.policy=hybrid", "parallel.group_size=3"}, node(6)), std::pair(3, 2));
  EXPECT_EQ(divided({"parallel.policy=hybrid"}, {.ranks = 6, .ranks_per_node = 2}), std::pair(2, 3));
  EXPECT_EQ(divided({"parallel.policy=hybrid"}, {.ranks = 2, .ranks_per_node = 8}), std::pair(2, 1));
  expect_error<UsageError>(
      [&] {
        divided({"parallel.policy=hybrid", "parallel.group_size=4"}, node(6));
      },
      {"parallel.group_size is 4", "6 ranks"});
  expect_error<UsageError>([&] { divided({"parallel.policy=hybrid"}, {.ranks = 6, .ranks_per_node = 4}); },
                           {"the ranks of a node: 4", "6 ranks"});
  expect_error<InternalError>([&] { divided({"parallel.policy=auto"}, node(6)); }, {"not chosen"});
}

TEST(StepPlan, OddAndSingleRanks) {
  for (int ranks : {1, 3, 5, 7}) {
    SCOPED_TRACE(ranks);
    for (const char* policy : {"full", "grads", "replicate", "hybrid"}) {
      const StepPlan plan = make_step_plan(small({std::string("parallel.policy=") + policy}), node(ranks));
      EXPECT_EQ(plan.schedule.world(), ranks);
      EXPECT_GE(plan.memory.bytes, plan.memory.live_bytes);
    }
  }
}

TEST(LargestMicroBatch, FitsAndTheNextDoesNot) {
  const config::Config config = reference();
  const auto planned = [&](int64_t micro_batch) {
    config::Config with = config;
    with.train.micro_batch = micro_batch;
    return make_step_plan(with, node(4)).memory.bytes;
  };
  for (int64_t micro_batch : {1, 3, 7}) {
    const int64_t bytes = planned(micro_batch);
    EXPECT_EQ(largest_micro_batch(config, node(4), bytes), micro_batch);
    EXPECT_EQ(largest_micro_batch(config, node(4), bytes - 1), micro_batch - 1);
  }
  EXPECT_EQ(largest_micro_batch(config, node(4), planned(8) + 1), 8) << "no more than asked for";
}

}  // namespace
}  // namespace minillm::train
