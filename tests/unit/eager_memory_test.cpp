#include "model/eager_memory.h"

#include <gtest/gtest.h>

#include "config/config.h"
#include "model/parameters.h"
#include "shard/fsdp2.h"
#include "shard/layout.h"

namespace minillm::model {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

config::Config reference() {
  return config::load(MINILLM_SOURCE_DIR "/configs/minillm.json", {});
}

shard::MemoryPlan planned(const config::Config& config, int world) {
  const shard::Layout layout = shard::make_layout(units(config.model), world);
  const int64_t rows = config.train.micro_batch * config.train.seq_len;
  const shard::Fsdp2Options options{.memory = eager_memory(config.model, rows, config.precision.param)};
  return shard::live_memory(shard::build_fsdp2(layout, options), layout);
}

// An activation of the reference, [8 · 1024][2048] in bf16, is 32 MiB.
TEST(EagerMemory, ActivationsOfAReferenceBlock) {
  const shard::EagerMemory memory = eager_memory(reference().model, 8192, DType::kBf16);
  const double input_normed_qkv = 5 * 32, attention = 2 * 32, middle_normed = 2 * 32, silu = 2 * 4 * 32;
  const double log_sum_exp = 0.5, rstd = 2 / 32.0;
  EXPECT_DOUBLE_EQ(static_cast<double>(memory.residual) / kMiB, 32);
  EXPECT_DOUBLE_EQ(static_cast<double>(memory.residual + memory.block_saved) / kMiB,
                   input_normed_qkv + attention + middle_normed + silu + log_sum_exp + rstd);
  EXPECT_DOUBLE_EQ(static_cast<double>(memory.block_forward_extra) / kMiB, 32);
  EXPECT_DOUBLE_EQ(static_cast<double>(memory.block_backward_extra) / kMiB, 3 * 32);
  EXPECT_EQ(memory.inputs, int64_t{8 + 8} * 8 * 1024) << "tokens and targets as int64";
}

TEST(EagerMemory, PeakOfTheReferenceIsTheLoss) {
  for (int world : {1, 2, 4, 8}) {
    SCOPED_TRACE(world);
    const double parameters = 735'199'232;
    const double master_and_moments = 12 * parameters / world;
    const double root_weights = 250 * kMiB;
    const double activations = (12 * 544.5625 + 32) * kMiB;  // of the blocks, and the head's input
    const double logits = 3 * 500 * kMiB;                    // log-probabilities, two gradients
    const double expected = master_and_moments + root_weights + activations + logits;
    const shard::MemoryPlan plan = planned(reference(), world);
    EXPECT_NEAR(static_cast<double>(plan.bytes), expected, 0.001 * expected);  // beside them: the inputs
    EXPECT_EQ(plan.peak_operation, "loss head");
  }
  EXPECT_NEAR(static_cast<double>(planned(reference(), 4).bytes), 10.93e9, 0.01e9);
}

TEST(EagerMemory, FewTokensPeakElsewhere) {
  config::Config config = reference();
  config.train.micro_batch = 1;
  config.train.seq_len = 128;
  EXPECT_EQ(planned(config, 2).peak_operation, "reduce copy in embedding") << "the root's reduction";
  EXPECT_EQ(planned(config, 8).peak_operation, "backward block1") << "gradient shards weigh less";
}

TEST(EagerMemory, WhatTheModelHasIsCounted) {
  const config::Model plain = reference().model;
  const shard::EagerMemory without = eager_memory(plain, 1024, DType::kBf16);
  const int64_t activation = 1024 * plain.dim * 2;

  config::Model rotary = plain;
  rotary.rope_theta = 10000;
  EXPECT_EQ(eager_memory(rotary, 1024, DType::kBf16).block_saved - without.block_saved, 2 * activation);

  config::Model normed = plain;
  normed.final_norm = true;
  EXPECT_EQ(eager_memory(normed, 1024, DType::kBf16).loss - without.loss, activation + int64_t{4} * 1024);

  const shard::EagerMemory fp32 = eager_memory(plain, 1024, DType::kFp32);
  EXPECT_EQ(fp32.loss, 2 * without.loss);
  EXPECT_EQ(fp32.inputs, without.inputs);

  // With few tokens the head's gradients outweigh the logits' and the log-probabilities.
  const int64_t weight = plain.vocab_size * plain.dim * 2, logits = 16 * plain.vocab_size * 2;
  EXPECT_EQ(eager_memory(plain, 16, DType::kBf16).loss, logits + weight + 16 * plain.dim * 2);
}

}  // namespace
}  // namespace minillm::model
