// What the tests under mpirun share: a tiny configuration, a fixed data set, whole tensors from all ranks,
// and a bootstrap of one rank, so that a run on one device can be compared with the same run on several.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "config/config.h"
#include "core/philox.h"
#include "tests/sanitizers.h"
#include "train/trainer.h"

namespace minillm::testing {

using test::kSanitized;
using test::kThreadSanitized;

/// The ranks of this mpirun, made in main().
inline comm::Bootstrap* world = nullptr;

/// Odd sizes everywhere: nothing divides by 2, 3 or 4 ranks but the batch, and slices have gaps. One head,
/// since the simulated device computes whole tiles for each, and no rank owns heads.
inline config::Config tiny_config() {
  config::Config config;
  config.model = {.vocab_size = 53, .dim = 40, .n_layers = 4, .n_heads = 1, .ffn_dim = 56};
  config.model.causal = true;
  config.model.rope_theta = 10000;
  config.model.final_norm = true;
  config.train.seq_len = 9;
  config.train.micro_batch = 12;
  config.train.head_chunk = 16;
  config.train.seed = 7;
  config.train.optimizer.lr = 1e-2;
  config.precision.param = DType::kFp32;
  return config;
}

/// Where the order of operations matters, not how much they do, and many ways to order them are tried.
inline config::Config smallest_config(DType dtype = DType::kBf16) {
  config::Config config = tiny_config();
  config.model.vocab_size = 29;
  config.model.dim = 16;
  config.model.n_heads = 2;
  config.model.ffn_dim = 24;
  config.train.seq_len = 5;
  config.precision.param = dtype;
  return config;
}

/// This rank's share of a global batch of random tokens, whatever the number of micro-batches.
inline void fill_inputs(train::Trainer& trainer, const config::Config& config, int rank, int64_t step) {
  const std::span<int32_t> tokens = trainer.tokens(step), targets = trainer.targets(step);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const PhiloxWords words =
        philox(99, static_cast<uint64_t>(step), static_cast<uint64_t>(rank) * tokens.size() + i);
    tokens[i] = static_cast<int32_t>(words.word[0] % static_cast<uint32_t>(config.model.vocab_size));
    targets[i] = static_cast<int32_t>(words.word[1] % static_cast<uint32_t>(config.model.vocab_size));
  }
}

using Tensors = std::map<std::string, std::vector<float>>;

/// Whole tensors by name, on rank 0; empty elsewhere.
inline Tensors gather_tensors(train::Trainer& trainer, train::ShardKind kind, comm::Bootstrap& bootstrap) {
  Tensors tensors;
  for (size_t u = 0; u < trainer.layout().units.size(); ++u) {
    const shard::UnitLayout& unit = trainer.layout().units[u];
    const std::vector<float> shard = trainer.read_shard(kind, static_cast<int>(u));
    std::vector<float> shards(bootstrap.rank() == 0 ? bootstrap.size() * shard.size() : 0);
    bootstrap.gather(bootstrap.everyone(), std::as_bytes(std::span(shard)),
                     std::as_writable_bytes(std::span(shards)));
    if (bootstrap.rank() != 0) continue;
    shards.resize(static_cast<size_t>(unit.padded_elements));  // of the first replica
    for (const shard::Slice& slice : unit.slices)
      tensors[slice.name] = shard::collect_slice(unit, slice, shards);
  }
  return tensors;
}

/// Options of trainers whose gradients are read.
inline train::TrainerOptions keeping_gradients() {
  train::TrainerOptions options;
  options.keep_gradients = true;
  return options;
}

/// ‖a - b‖ / ‖b‖, in double.
inline double relative_error(std::span<const float> a, std::span<const float> b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

/// Runs `steps` steps and returns the losses.
inline std::vector<double> train_losses(train::Trainer& trainer, const config::Config& config, int rank,
                                        int64_t steps) {
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    fill_inputs(trainer, config, rank, step);
    trainer.enqueue(step);
    if (step > 0) losses.push_back(trainer.result(step - 1).loss);
  }
  losses.push_back(trainer.result(steps - 1).loss);
  return losses;
}

/// Starts MPI, runs the tests on all ranks, fails on all if one fails.
inline int run_tests(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::unique_ptr<comm::Bootstrap> bootstrap = comm::make_bootstrap(&argc, &argv);
  world = bootstrap.get();
  if (world->rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
  }
  const int failed = RUN_ALL_TESTS();
  return world->max(failed) == 0 ? 0 : 1;
}

}  // namespace minillm::testing
