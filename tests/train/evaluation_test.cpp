#include "train/evaluation.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "support.h"
#include "tests/unit/errors.h"

namespace minillm::train {
namespace {

using minillm::test::expect_error;
using test::h100;
using test::node;
using test::small;

using Keys = std::vector<std::string>;

TEST(Evaluation, RatesFollowFromTheStep) {
  const Evaluation one = evaluate(small(), node(2), h100());
  const Evaluation two = evaluate(small({"train.grad_accumulation=2"}), node(2), h100());
  EXPECT_DOUBLE_EQ(one.tokens_per_s(), 4 * 256 / one.timeline.step_s);
  EXPECT_DOUBLE_EQ(two.tokens_per_s(), 2 * 4 * 256 / two.timeline.step_s);
  EXPECT_DOUBLE_EQ(two.model_flops(), 2 * one.model_flops());
  EXPECT_DOUBLE_EQ(one.mfu(h100()), one.model_flops() / one.timeline.step_s / 989e12);
  shard::Hardware unknown = h100();
  unknown.peak_flops_per_s.reset();
  EXPECT_EQ(one.mfu(unknown), 0);
}

// 6 operations for each parameter of a product and token, 12 T for each channel of attention.
TEST(Evaluation, ModelFlopsAreTheFormula) {
  const config::Config config = small();
  const double dim = 256, tokens = 4 * 256, blocks = 4;
  const double products = blocks * 12 * dim * dim + 1024 * dim;  // the head's rows to a multiple of 64
  const double expected = tokens * (6 * products + blocks * 12 * 256 * dim);
  EXPECT_NEAR(evaluate(config, node(2), h100()).model_flops(), expected, 1e-9 * expected);
  // The head whole, not in two operations.
  EXPECT_NEAR(evaluate(small({"train.head_chunk=256"}), node(2), h100()).model_flops(), expected,
              1e-9 * expected);
  // Computing again is no model's work.
  EXPECT_NEAR(evaluate(small({"memory.recompute=block"}), node(2), h100()).model_flops(), expected,
              1e-9 * expected);
}

TEST(Evaluation, AGraphIsNoFasterThanStepsThatOverlap) {
  const double eager = evaluate(small(), node(8), h100()).timeline.step_s;
  const double graph = evaluate(small({"train.cuda_graph=true"}), node(8), h100()).timeline.step_s;
  EXPECT_GE(graph, eager);
}

// Autograd computes both gradients of the head before its hook runs.
TEST(Fsdp2Evaluation, HasTheHeadAsOneOperation) {
  const Evaluation ours = evaluate(small(), node(2), h100());
  const Evaluation fsdp2 = evaluate_fsdp2(small(), node(2), h100());
  const auto head_s = [](const Evaluation& evaluation, int operations) {
    double seconds = 0;
    for (size_t i = 0; i < evaluation.costs.size(); ++i) {
      const shard::Operation& operation = evaluation.plan.schedule.operations[i];
      if (operation.kind != shard::OpKind::kHeadLoss &&
          (operation.kind != shard::OpKind::kBackwardInput || operation.unit != 5))
        continue;
      --operations;
      seconds += evaluation.costs[i].latency_s + evaluation.costs[i].busy_s;
    }
    EXPECT_EQ(operations, 0);
    return seconds;
  };
  EXPECT_DOUBLE_EQ(head_s(fsdp2, 1), head_s(ours, 2)) << "of the same kernels";
}

TEST(Fsdp2Evaluation, TellsWhatItGoesWithout) {
  const auto left_out = [](const Keys& overrides) {
    return evaluate_fsdp2(small(overrides), node(2), h100()).left_out;
  };
  EXPECT_EQ(left_out({"memory.recompute=none"}), Keys{});
  EXPECT_EQ(left_out({}), Keys{"memory.recompute"});
  EXPECT_EQ(left_out({"memory.recompute=none", "train.grad_clip=1", "train.grad_accumulation=2"}), Keys{});
  EXPECT_EQ(left_out({"memory.recompute=none", "parallel.weight_slots=3", "parallel.gradient_slots=3",
                      "train.grad_accumulation=2", "parallel.reduce_every_micro_batch=false",
                      "precision.reduce=bf16", "precision.moments=bf16", "train.cuda_graph=true"}),
            (Keys{"parallel.weight_slots", "parallel.gradient_slots", "parallel.reduce_every_micro_batch",
                  "precision.reduce", "precision.moments", "train.cuda_graph"}));
}

// And that none of it changes anything.
TEST(Fsdp2Evaluation, WhatIsLeftOutHasNoEffect) {
  const Evaluation plain = evaluate_fsdp2(small({"memory.recompute=none"}), node(4), h100());
  for (const char* key : {"memory.recompute=block", "parallel.weight_slots=3", "parallel.gradient_slots=3",
                          "precision.reduce=bf16", "precision.moments=bf16", "train.cuda_graph=true"}) {
    const Evaluation other = evaluate_fsdp2(small({"memory.recompute=none", key}), node(4), h100());
    EXPECT_EQ(other.timeline.step_s, plain.timeline.step_s) << key;
    EXPECT_EQ(other.plan.memory.bytes, plain.plan.memory.bytes) << key;
    EXPECT_EQ(other.timeline.wire_bytes.reduce_scatter, plain.timeline.wire_bytes.reduce_scatter) << key;
    EXPECT_EQ(other.left_out.size(), 1u) << key;
  }
}

TEST(Fsdp2Evaluation, RefusesOtherPolicies) {
  expect_error<UsageError>([] { evaluate_fsdp2(small({"parallel.policy=grads"}), node(2), h100()); },
                           {"\"fsdp2\"", "parallel.policy", "\"grads\""});
}

}  // namespace
}  // namespace minillm::train
