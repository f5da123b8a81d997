#include "model/eager_memory.h"

#include <gtest/gtest.h>

#include "config/config.h"
#include "core/format.h"
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

// What fully_shard on every block and on the root allocates at most in a step, AdamW's state included:
// PyTorch 2.15's CUDA code on tensors without memory (FakeTensorMode, a fake process group), counted by
// storage in pieces of 512 bytes. FSDPMemTracker's count agrees.
struct Measured {
  const char* name;
  int world;
  int64_t bytes;
  const char* operation;  // of the plan
  void (*edit)(config::Config&) = [](config::Config&) {};
};

void small_vocabulary(config::Config& config) {
  config.model.vocab_size = 2048;
}
void modern(config::Config& config) {
  config.model.causal = true;
  config.model.rope_theta = 10000;
  config.model.final_norm = true;
}
void small_and_modern(config::Config& config) {
  small_vocabulary(config);
  modern(config);
}
void few_tokens(config::Config& config) {
  config.train.micro_batch = 1;
  config.train.seq_len = 128;
}

constexpr Measured kMeasured[] = {
    {"reference", 1, 17'140'626'432, "loss head"},
    {"reference", 2, 12'729'431'040, "loss head"},
    {"reference", 4, 10'523'833'344, "loss head"},
    {"reference", 8, 9'421'034'496, "loss head"},
    {"vocabulary of 2048", 1, 14'127'043'584, "backward block11", small_vocabulary},
    {"vocabulary of 2048", 8, 7'796'315'136, "backward block11", small_vocabulary},
    {"RoPE, final norm", 8, 10'675'171'328, "loss head", modern},
    {"RoPE, final norm, vocabulary of 2048", 8, 9'016'868'864, "backward block11", small_and_modern},
    {"few tokens", 8, 2'263'242'240, "backward block1", few_tokens},
};

TEST(EagerMemory, IsWhatPyTorchAllocates) {
  for (const Measured& measured : kMeasured) {
    SCOPED_TRACE(format("%s, %d ranks", measured.name, measured.world));
    config::Config config = reference();
    measured.edit(config);
    const shard::MemoryPlan plan = planned(config, measured.world);
    // Every rotation of the measured program makes tables of its own: Q's and K's, sines and cosines.
    const int64_t tables =
        config.model.rope_theta > 0 ? 4 * config.train.seq_len * config.model.head_size() / 2 * 4 : 0;
    EXPECT_EQ(plan.bytes + config.model.n_layers * tables, measured.bytes);
    EXPECT_EQ(plan.peak_operation, measured.operation);
  }
}

// An activation of the reference, [8 · 1024][2048] in bf16, is 32 MiB.
TEST(EagerMemory, ActivationsOfAReferenceBlock) {
  const shard::EagerMemory memory = eager_memory(reference().model, 8192, DType::kBf16);
  const double input_normed_qkv = 5 * 32, attention = 32, middle_normed = 2 * 32, silu = 2 * 4 * 32;
  const double log_sum_exp = 0.5, rstd = 2 / 32.0, seed_and_offset = 2 * 512 / kMiB;
  EXPECT_DOUBLE_EQ(static_cast<double>(memory.residual) / kMiB, 32);
  EXPECT_DOUBLE_EQ(
      static_cast<double>(memory.residual + memory.block_saved) / kMiB,
      input_normed_qkv + attention + middle_normed + silu + log_sum_exp + rstd + seed_and_offset);
  EXPECT_DOUBLE_EQ(static_cast<double>(memory.block_forward_extra) / kMiB, 32);
  EXPECT_DOUBLE_EQ(static_cast<double>(memory.block_backward) / kMiB, 4 * 32 + 32)
      << "of SiLU's output and of the weight that it is multiplied by";
  EXPECT_EQ(memory.inputs, int64_t{8 + 8} * 8 * 1024 + 2 * 512) << "tokens and targets as int64, the loss";
}

TEST(EagerMemory, WhatTheModelHasIsCounted) {
  const config::Model plain = reference().model;
  const shard::EagerMemory without = eager_memory(plain, 1024, DType::kBf16);
  const int64_t activation = 1024 * plain.dim * 2;

  config::Model rotary = plain;
  rotary.rope_theta = 10000;
  EXPECT_EQ(eager_memory(rotary, 1024, DType::kBf16).block_saved - without.block_saved, 3 * activation)
      << "Q, K, and the attention's output once more";

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
