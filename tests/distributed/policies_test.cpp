// Every policy trains the same model: bit for bit where sums keep their order, within rounding elsewhere.
#include <algorithm>
#include <cmath>
#include <functional>

#include "core/error.h"
#include "cuda/memory.h"
#include "kernels/cross_entropy.h"
#include "support.h"

namespace minillm::testing {
namespace {

using Change = std::function<void(config::Config&)>;

/// Few sequences: every case trains again, and none is compared with another number of ranks. All logits at
/// once, so that the head is two operations and, as it has a final norm, reduced in two parts.
config::Config base(DType dtype = DType::kBf16) {
  config::Config config = smallest_config(dtype);
  config.train.micro_batch = 2;
  config.train.head_chunk = config.train.micro_batch * config.train.seq_len;
  return config;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<double> norms;
  Tensors weights;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome train(const config::Config& config, const train::TrainerOptions& options = {}) {
  const int64_t before = cuda::device_bytes_in_use();
  train::Trainer trainer(config, *world, options);
  Outcome outcome;
  for (int64_t step = 0; step < 3; ++step) {
    fill_inputs(trainer, config, world->rank(), step);
    trainer.enqueue(step);
    const train::StepResult result = trainer.result(step);
    EXPECT_FALSE(result.skipped);
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.gradient_norm);
  }
  EXPECT_EQ(cuda::device_bytes_in_use() - before, trainer.memory().bytes);
  outcome.weights = gather_tensors(trainer, train::ShardKind::kMaster, *world);
  return outcome;
}

Outcome train(const Change& change) {
  config::Config config = base();
  change(config);
  return train(config);
}

// Not the weights: AdamW moves those whose gradients are nothing but rounding as far as others.
void expect_near(const Outcome& found, const Outcome& expected, double tolerance) {
  for (size_t step = 0; step < expected.losses.size(); ++step) {
    EXPECT_NEAR(found.losses[step], expected.losses[step], tolerance * expected.losses[step]) << step;
    EXPECT_NEAR(found.norms[step], expected.norms[step], 10 * tolerance * expected.norms[step]) << step;
  }
}

TEST(Policies, WhatChangesOnlyTheOrderChangesNoBit) {
  const Outcome expected = train([](auto&) {});
  EXPECT_TRUE(std::isfinite(expected.losses.back()));
  const std::vector<std::pair<const char*, Change>> changes = {
      {"slots 3, 1",
       [](auto& c) {
         c.parallel.weight_slots = 3;
         c.parallel.gradient_slots = 1;
       }},
      {"slots 4, 6",
       [](auto& c) {
         c.parallel.weight_slots = 4;
         c.parallel.gradient_slots = 6;
       }},
      {"weights kept", [](auto& c) { c.parallel.policy = "grads"; }},
      {"recompute none", [](auto& c) { c.memory.recompute = {config::Recompute::kNone}; }},
      {"recompute block", [](auto& c) { c.memory.recompute = {config::Recompute::kBlock}; }},
      {"recompute mixed",
       [](auto& c) {
         c.memory.recompute = {config::Recompute::kBlock, config::Recompute::kCheap,
                               config::Recompute::kBlock, config::Recompute::kNone};
       }},
      {"graph", [](auto& c) { c.train.cuda_graph = true; }},
      {"graph, weights kept, block",
       [](auto& c) {
         c.train.cuda_graph = true;
         c.parallel.policy = "grads";
         c.memory.recompute = {config::Recompute::kBlock};
       }},
      {"collectives' thread blocks",
       [](auto& c) {
         c.parallel.gather_ctas = 4;
         c.parallel.reduce_ctas = 8;
         c.parallel.copy_engines = false;
       }},
  };
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    EXPECT_EQ(train(change), expected);
  }
  for (int deferred : {0, 1, 2, 4}) {
    train::TrainerOptions options;
    options.deferred_blocks = deferred;
    EXPECT_EQ(train(base(), options), expected) << deferred << " deferred blocks";
  }
  EXPECT_EQ(train(base(), keeping_gradients()), expected);
}

// The head as one operation, and as two without a final norm, whose gradients are one collective.
TEST(Policies, HeadsOfOtherKinds) {
  const std::vector<std::pair<const char*, Change>> heads = {
      {"logits in chunks", [](auto& c) { c.train.head_chunk = 4; }},
      {"no final norm", [](auto& c) { c.model.final_norm = false; }}};
  for (const auto& [name, change] : heads) {
    SCOPED_TRACE(name);
    const Outcome expected = train(change);
    EXPECT_TRUE(std::isfinite(expected.losses.back()));
    for (const bool graph : {false, true}) {
      config::Config config = base();
      change(config);
      config.parallel.policy = "grads";
      config.parallel.gradient_slots = 1;
      config.train.cuda_graph = graph;
      EXPECT_EQ(train(config), expected) << graph;
    }
    config::Config replicas = base();
    change(replicas);
    replicas.parallel.policy = "replicate";
    EXPECT_EQ(train(replicas).weights, expected.weights);
  }
}

// Replicas sum whole gradients in the order of ranks, as shards do; only the norm is summed in other parts.
TEST(Policies, ReplicasTrainTheSameModel) {
  const Outcome sharded = train([](auto&) {});
  Outcome replicated = train([](auto& c) { c.parallel.policy = "replicate"; });
  EXPECT_EQ(replicated.losses, sharded.losses);
  EXPECT_EQ(replicated.weights, sharded.weights);
  for (size_t step = 0; step < sharded.norms.size(); ++step)
    EXPECT_NEAR(replicated.norms[step], sharded.norms[step], 1e-5 * sharded.norms[step]);
  EXPECT_EQ(train([](auto& c) {
              c.parallel.policy = "replicate";
              c.train.cuda_graph = true;
            }),
            replicated);
}

TEST(Policies, GroupsShareAModelAndSumOverReplicas) {
  const Outcome expected = train(base(DType::kFp32));
  for (int64_t group : {1, 2, 3, 4}) {
    if (world->size() % group != 0) continue;
    config::Config config = base(DType::kFp32);
    config.parallel.policy = "hybrid";
    config.parallel.group_size = group;
    const Outcome eager = train(config);
    expect_near(eager, expected, 1e-5);
    config.train.cuda_graph = true;
    config.parallel.weight_slots = 4;
    EXPECT_EQ(train(config), eager) << "graph, " << group << " ranks in a group";
  }
}

TEST(Policies, GroupsThatDoNotDivideTheRanksAreRefused) {
  config::Config config = base();
  config.parallel.policy = "hybrid";
  config.parallel.group_size = 5;
  try {
    train::Trainer trainer(config, *world);
    ADD_FAILURE() << "groups of 5 among " << world->size() << " ranks";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("parallel.group_size is 5"), std::string::npos) << error.what();
  }
}

// The scale of gradients is that of the mean over all valid targets, whoever sums them.
TEST(Policies, GradientsHaveOneScale) {
  const auto gradients = [](const Change& change) {
    config::Config config = base(DType::kFp32);
    change(config);
    train::Trainer trainer(config, *world, keeping_gradients());
    fill_inputs(trainer, config, world->rank(), 0);
    // Some targets do not count, and not as many on each rank.
    const std::span<int32_t> targets = trainer.targets(0);
    std::fill_n(targets.begin(), 1 + world->rank() * 3, kernels::kIgnoreTarget);
    trainer.enqueue(0);
    trainer.result(0);
    return gather_tensors(trainer, train::ShardKind::kGradient, *world);
  };
  const Tensors expected = gradients([](auto&) {});
  const std::vector<std::pair<const char*, Change>> changes = {
      {"replicate", [](auto& c) { c.parallel.policy = "replicate"; }},
      {"hybrid",
       [](auto& c) {
         c.parallel.policy = "hybrid";
         c.parallel.group_size = world->size() % 2 == 0 ? 2 : 1;
       }},
      {"two micro-batches",
       [](auto& c) {
         c.train.grad_accumulation = 2;
         c.train.micro_batch /= 2;
       }},
      {"clip", [](auto& c) { c.train.grad_clip = 1e9; }},
  };
  for (const auto& [name, change] : changes)
    for (const auto& [tensor, values] : gradients(change))
      EXPECT_LT(relative_error(values, expected.at(tensor)), 2e-6) << name << " " << tensor;
}

TEST(Accumulation, MicroBatchesAreOneBatch) {
  config::Config config = base(DType::kFp32);
  config.train.micro_batch = 6;
  const Outcome whole = train(config);
  for (int64_t micro_batches : {2, 3, 6})
    for (const char* policy : {"full", "grads", "replicate"})
      for (bool reduce_every : {true, false})
        for (bool graph : {false, true}) {
          // One is enough of what takes long.
          if (graph && micro_batches != 3) continue;
          if (micro_batches == 6 && std::string(policy) != "full") continue;
          SCOPED_TRACE(std::to_string(micro_batches) + " micro-batches, " + policy +
                       (reduce_every ? ", reduced each" : ", reduced once") + (graph ? ", graph" : ""));
          config::Config parts = config;
          parts.train.micro_batch = 6 / micro_batches;
          parts.train.grad_accumulation = micro_batches;
          parts.parallel.policy = policy;
          parts.parallel.reduce_every_micro_batch = reduce_every;
          parts.train.cuda_graph = graph;
          expect_near(train(parts), whole, 1e-5);
        }
}

// Gradients are rounded to 8 bits once per rank; their sums are fp32.
TEST(Precision, Bf16ReductionIsCloseAndRepeatable) {
  const Outcome exact = train(base(DType::kFp32));
  config::Config config = base(DType::kFp32);
  config.precision.reduce = DType::kBf16;
  const Outcome rounded = train(config);
  EXPECT_EQ(train(config), rounded);
  if (world->size() == 1) {
    EXPECT_EQ(rounded, exact) << "nothing is reduced on one rank";
    return;
  }
  EXPECT_NE(rounded.norms, exact.norms);
  for (size_t step = 0; step < exact.losses.size(); ++step) {
    EXPECT_NEAR(rounded.losses[step], exact.losses[step], 2e-2);
    EXPECT_NEAR(rounded.norms[step], exact.norms[step], 1e-2 * exact.norms[step]);
  }
  config.train.grad_accumulation = 2;
  config.train.micro_batch /= 2;
  expect_near(train(config), rounded, 5e-3);
}

TEST(Clipping, UpdatesWaitForTheNorm) {
  const auto clipped = [](const char* policy, bool graph) {
    config::Config config = base(DType::kFp32);
    config.train.grad_clip = 0.1;
    config.parallel.policy = policy;
    config.train.cuda_graph = graph;
    return train(config);
  };
  const Outcome expected = clipped("full", false);
  EXPECT_GT(expected.norms.front(), 0.1);
  const Outcome unclipped = train(base(DType::kFp32));
  EXPECT_NE(expected.losses, unclipped.losses) << "the limit has to matter";
  EXPECT_EQ(clipped("full", true), expected);
  EXPECT_EQ(clipped("grads", false), expected);
  expect_near(clipped("replicate", false), expected, 1e-5);
}

TEST(Sizes, NothingDividesByAnything) {
  config::Config config = base(DType::kFp32);
  config.model.vocab_size = 50257;
  config.model.dim = 24;
  config.model.n_heads = 3;
  config.model.ffn_dim = 36;
  config.model.n_layers = 2;
  config.train.micro_batch = 1;
  const Outcome full = train(config);
  config.parallel.policy = "replicate";
  expect_near(train(config), full, 1e-5);
}

// What the sanitizers run of this program: every kind of operation, each way to launch and to share.
TEST(Sanitized, EveryKindOfOperation) {
  const std::vector<std::pair<const char*, Change>> ways = {
      {"clipped, blocks computed again",
       [](auto& c) {
         c.train.grad_clip = 1e9;
         c.memory.recompute = {config::Recompute::kBlock};
       }},
      {"weights kept, graph",
       [](auto& c) {
         c.parallel.policy = "grads";
         c.train.cuda_graph = true;
       }},
      {"micro-batches, bf16 reduction, one gradient slot",
       [](auto& c) {
         c.train.grad_accumulation = 2;
         c.train.micro_batch = 1;
         c.precision.reduce = DType::kBf16;
         c.parallel.gradient_slots = 1;
       }},
      {"groups, micro-batches reduced once",
       [](auto& c) {
         c.parallel.policy = "hybrid";
         c.parallel.group_size = world->size() % 2 == 0 ? 2 : 1;
         c.train.grad_accumulation = 2;
         c.train.micro_batch = 1;
         c.parallel.reduce_every_micro_batch = false;
       }},
      {"replicas", [](auto& c) { c.parallel.policy = "replicate"; }}};
  const Outcome expected = train([](auto&) {});
  for (const auto& [name, way] : ways) {
    SCOPED_TRACE(name);
    expect_near(train(way), expected, 2e-2);
  }
}

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
