// Sharded training on the ranks of mpirun: the same model, the same numbers, the planned memory, the counted
// bytes.
#include <algorithm>
#include <cmath>

#include "cuda/memory.h"
#include "model/parameters.h"
#include "support.h"

namespace minillm::testing {
namespace {

config::Config share_of(config::Config config) {
  config.train.micro_batch /= world->size();
  return config;
}

TEST(Sharding, InitialWeightsAreTheSameAtAnyWorldSize) {
  const config::Config config = tiny_config();
  train::Trainer sharded(share_of(config), *world);
  const Tensors found = gather_tensors(sharded, train::ShardKind::kMaster, *world);
  if (world->rank() != 0) return;
  const std::unique_ptr<comm::Bootstrap> solo = comm::make_single_process();
  train::Trainer whole(config, *solo);
  const Tensors expected = gather_tensors(whole, train::ShardKind::kMaster, *solo);
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, values] : expected) EXPECT_EQ(found.at(name), values) << name;
}

TEST(Sharding, LossesAndGradientScaleMatchOneRank) {
  const config::Config config = tiny_config();
  train::Trainer sharded(share_of(config), *world, keeping_gradients());
  fill_inputs(sharded, share_of(config), world->rank(), 0);
  sharded.enqueue(0);
  const train::StepResult result = sharded.result(0);
  const Tensors gradients = gather_tensors(sharded, train::ShardKind::kGradient, *world);
  const std::vector<double> losses = [&] {
    train::Trainer again(share_of(config), *world);
    return train_losses(again, share_of(config), world->rank(), 4);
  }();
  if (world->rank() != 0) return;

  const std::unique_ptr<comm::Bootstrap> solo = comm::make_single_process();
  train::Trainer whole(config, *solo, keeping_gradients());
  fill_inputs(whole, config, 0, 0);
  whole.enqueue(0);
  const train::StepResult expected = whole.result(0);
  EXPECT_EQ(result.valid_targets, expected.valid_targets);
  EXPECT_NEAR(result.gradient_norm, expected.gradient_norm, 1e-5 * expected.gradient_norm);
  // fp32 sums in another order: about sqrt(rows) roundings of 6e-8.
  for (const auto& [name, values] : gather_tensors(whole, train::ShardKind::kGradient, *solo))
    EXPECT_LT(relative_error(gradients.at(name), values), 2e-6) << name;
  train::Trainer again(config, *solo);
  const std::vector<double> expected_losses = train_losses(again, config, 0, 4);
  for (size_t step = 0; step < losses.size(); ++step)
    EXPECT_NEAR(losses[step], expected_losses[step], 1e-4) << "step " << step;
}

TEST(Sharding, LossesDoNotDependOnTheHeadChunk) {
  const auto losses = [&](int64_t chunk) {
    config::Config config = share_of(tiny_config());
    config.train.head_chunk = chunk;
    train::Trainer trainer(config, *world);
    return train_losses(trainer, config, world->rank(), 3);
  };
  const std::vector<double> whole = losses(1000), pieces = losses(5);
  for (size_t step = 0; step < whole.size(); ++step) EXPECT_NEAR(whole[step], pieces[step], 1e-5);
}

// More rows at a time than the 1024 that there always are, where blocks need the memory anyway.
TEST(Sharding, HeadChunkFromThePlan) {
  const auto plan = [](int64_t chunk) {
    config::Config config = tiny_config();
    config.model.vocab_size = 180;
    config.train.micro_batch = 16;
    config.train.seq_len = 256;
    config.train.head_chunk = chunk;
    return train::make_step_plan(config, {world->size(), world->size()});
  };
  const train::StepPlan chosen = plan(0), least = plan(1024), most = plan(4096);
  EXPECT_LE(chosen.memory.bytes, least.memory.bytes);
  EXPECT_EQ(chosen.config.train.head_chunk, 2048) << "as wide as the feed-forward part of all rows, about";
  EXPECT_GT(most.memory.bytes, least.memory.bytes);
}

// Rounding moments to bf16 changes losses little and in the same way in every run, and halves what they take.
TEST(Sharding, Bf16Moments) {
  struct Run {
    std::vector<double> losses;
    std::vector<float> moments;
    int64_t bytes;
  };
  const auto run = [](DType type, int64_t seed) {
    config::Config config = share_of(tiny_config());
    config.precision.moments = type;
    config.train.seed = seed;
    train::Trainer trainer(config, *world);
    Run result{train_losses(trainer, config, world->rank(), 4), {}, trainer.memory().bytes};
    for (const auto kind : {train::ShardKind::kMoment1, train::ShardKind::kMoment2})
      for (int unit = 0; unit < std::ssize(trainer.layout().units); ++unit)
        for (const float x : trainer.read_shard(kind, unit)) result.moments.push_back(x);
    return result;
  };
  const Run exact = run(DType::kFp32, 0), rounded = run(DType::kBf16, 0), again = run(DType::kBf16, 0);
  EXPECT_EQ(rounded.losses, again.losses);
  EXPECT_EQ(rounded.moments, again.moments);
  ASSERT_EQ(rounded.moments.size(), exact.moments.size());
  EXPECT_EQ(exact.bytes - rounded.bytes, std::ssize(exact.moments) * 2);
  int64_t different = 0;
  for (size_t i = 0; i < exact.moments.size(); ++i) {
    different += rounded.moments[i] != exact.moments[i];
    // Four roundings of at most 2^-7 each.
    ASSERT_NEAR(rounded.moments[i], exact.moments[i], std::abs(exact.moments[i]) * 0.04 + 1e-4) << i;
  }
  EXPECT_GT(different, std::ssize(exact.moments) / 4);
  for (size_t step = 0; step < exact.losses.size(); ++step)
    EXPECT_NEAR(rounded.losses[step], exact.losses[step], 1e-2);
}

TEST(Sharding, MeasuredPeakIsThePlan) {
  const int64_t before = cuda::device_bytes_in_use();
  const config::Config config = share_of(tiny_config());
  train::Trainer trainer(config, *world);
  train_losses(trainer, config, world->rank(), 2);
  EXPECT_EQ(cuda::device_bytes_in_use() - before, trainer.memory().bytes);
}

TEST(Sharding, ARankOwnsOneNthOfThePaddedUnits) {
  train::Trainer trainer(share_of(tiny_config()), *world);
  int64_t elements = 0;
  for (const shard::UnitLayout& unit : trainer.layout().units) {
    EXPECT_EQ(unit.shard_elements * world->size(), unit.padded_elements);
    const int64_t vocabulary = unit.name == "head" ? 63 * tiny_config().model.dim : 0;
    EXPECT_LT(unit.padded_elements - unit.elements,
              (world->size() * std::ssize(unit.segments) + std::ssize(unit.slices)) * shard::kSliceAlignment +
                  vocabulary);
    elements += unit.elements;
  }
  int64_t expected = 0;
  model::for_each_parameter(tiny_config().model, [&](const model::Parameter& parameter) {
    int64_t product = 1;
    for (const int64_t size : parameter.shape) product *= size;
    expected += product;
  });
  EXPECT_EQ(elements, expected);
  EXPECT_EQ(trainer.layout().elements(), expected);
}

TEST(Sharding, BytesOnTheWireFollowTheFormula) {
  const config::Config config = share_of(tiny_config());
  train::Trainer trainer(config, *world);
  constexpr int64_t kSteps = 3;
  train_losses(trainer, config, world->rank(), kSteps);
  if (world->size() == 1) {
    EXPECT_TRUE(trainer.communicators().empty());
    return;
  }
  const auto& units = trainer.layout().units;
  const int64_t others = world->size() - 1;
  // Gathers: every unit once in forward; backward all blocks but the two still in their slots. Before the
  // first step those that a step before would have issued, so as many for steps that do not come.
  int64_t gathered = 0, reduced = 0, ahead = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    const bool block = u > 0 && u + 1 < units.size();
    const bool again = block && u + 3 < units.size();
    gathered += units[u].shard_elements * (again ? 2 : 1);
    reduced += units[u].shard_elements;
    if (u <= 2) ahead += units[u].shard_elements;
  }
  const comm::Traffic& gather = trainer.communicators()[0]->traffic();
  const comm::Traffic& reduce = trainer.communicators()[1]->traffic();
  EXPECT_EQ(gather.all_gather_bytes, (kSteps * gathered + ahead) * others * size_of(config.precision.param));
  EXPECT_EQ(gather.reduce_scatter_calls + gather.all_reduce_calls, 0);
  EXPECT_EQ(reduce.reduce_scatter_bytes, kSteps * reduced * others * 4);
  EXPECT_EQ(reduce.all_reduce_calls, kSteps * 3);
  EXPECT_EQ(reduce.all_gather_calls, 0);
}

TEST(Sharding, ANonFiniteGradientSkipsTheStepOnAllRanks) {
  config::Config config = share_of(tiny_config());
  train::Trainer trainer(config, *world);
  fill_inputs(trainer, config, world->rank(), 0);
  // An invalid target makes the loss NaN on one rank only; all have to leave their weights alone.
  if (world->rank() == world->size() - 1) trainer.targets(0)[0] = 1 << 20;
  const std::vector<float> before = trainer.read_shard(train::ShardKind::kMaster, 1);
  trainer.enqueue(0);
  EXPECT_TRUE(trainer.result(0).skipped);
  EXPECT_EQ(trainer.read_shard(train::ShardKind::kMaster, 1), before);
  fill_inputs(trainer, config, world->rank(), 1);
  trainer.enqueue(1);
  EXPECT_FALSE(trainer.result(1).skipped);
  EXPECT_NE(trainer.read_shard(train::ShardKind::kMaster, 1), before);
}

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
