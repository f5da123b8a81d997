// Timed choices of algorithms in training: one for all ranks, made before the first step, at no cost in
// memory.
#include <cstring>
#include <numeric>

#include "sim/blas.h"
#include "sim/counters.h"
#include "support.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::testing {
namespace {

using Products = std::array<int64_t, sim::kBlasCandidates>;

/// Every rank finds another candidate the fastest: rank 0 the second, rank 1 the third, and so on.
void disagree() {
  std::array<std::chrono::microseconds, sim::kBlasCandidates> delays;
  for (size_t i = 0; i < delays.size(); ++i)
    delays[i] = std::chrono::milliseconds((static_cast<int>(i) + 2 * world->rank() + 2) % 3);
  sim::set_blas_delays(delays);
}

config::Config timed_config() {
  config::Config config = tiny_config();
  if (kThreadSanitized) {  // orderings show at any size
    config.model.n_layers = 1;
    config.model.vocab_size = 11;
    config.train.seq_len = 4;
    config.train.micro_batch = world->size();
  }
  config.train.micro_batch /= world->size();
  config.gemm.deterministic = false;
  return config;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<float> weights;  ///< this rank's of a block, after the steps
  Products products{};         ///< of the steps alone, by candidate
  int64_t timing = 0;          ///< products before them
};

Outcome run(const config::Config& config) {
  const Products start = sim::blas_record().products;
  train::Trainer trainer(config, *world);
  const Products before = sim::blas_record().products;
  Outcome result;
  result.losses = train_losses(trainer, config, world->rank(), 3);
  result.weights = trainer.read_shard(train::ShardKind::kMaster, 1);
  const Products after = sim::blas_record().products;
  for (size_t i = 0; i < after.size(); ++i) {
    result.products[i] = after[i] - before[i];
    result.timing += before[i] - start[i];
  }
  return result;
}

TEST(GemmChoices, AllRanksUseThoseOfRankZero) {
  disagree();
  const Outcome timed = run(timed_config());
  EXPECT_EQ(timed.products[0], 0);
  EXPECT_GT(timed.products[1], 0);  // rank 0's fastest
  EXPECT_EQ(timed.products[2], 0);

  config::Config config = timed_config();
  config.gemm.deterministic = true;
  const Outcome first = run(config);
  EXPECT_EQ(first.timing, 0);
  EXPECT_EQ(first.products, (Products{timed.products[1], 0, 0}));
  sim::set_blas_delays({});
  // Another order of sums, and the same initial values: nothing of the rehearsal or of the timing is left.
  EXPECT_NE(timed.weights, first.weights);
  // AdamW divides by the gradient's size, which makes rounding errors of small gradients larger; other
  // initial values would give an error of about 1.
  EXPECT_LT(relative_error(timed.weights, first.weights), 1e-4);
  for (size_t i = 0; i < first.losses.size(); ++i) EXPECT_NEAR(timed.losses[i], first.losses[i], 1e-5);
}

TEST(GemmChoices, AFileMakesRunsRepeatable) {
  std::array<char, 4096> path{};
  std::unique_ptr<test::TemporaryFolder> folder;
  if (world->rank() == 0) {
    folder = std::make_unique<test::TemporaryFolder>();
    std::strncpy(path.data(), folder->path("choices.json").c_str(), path.size() - 1);
  }
  world->broadcast(std::as_writable_bytes(std::span(path)));
  config::Config config = timed_config();
  config.gemm.cache = path.data();
  disagree();
  const Outcome made = run(config);
  sim::set_blas_delays({});  // now any candidate may be the fastest
  const Outcome read = run(config);
  EXPECT_EQ(read.losses, made.losses);
  EXPECT_EQ(read.weights, made.weights);
  EXPECT_EQ(read.products, made.products);
  // One step to learn the shapes, and no timing of them.
  EXPECT_EQ(3 * read.timing, std::accumulate(read.products.begin(), read.products.end(), int64_t{0}));
  if (world->rank() == 0) {
    EXPECT_GT(made.timing, read.timing);
  }
  world->barrier();
}

TEST(GemmChoices, TimingStaysWithinThePlannedMemory) {
  sim::reset_counters();
  const int64_t before = sim::counters().allocated_bytes;
  const config::Config config = timed_config();
  train::Trainer trainer(config, *world);
  train_losses(trainer, config, world->rank(), 2);
  EXPECT_EQ(sim::counters().peak_bytes - before, trainer.memory().bytes);
}

TEST(GemmChoices, ALimitOfMultiprocessorsReachesTheProducts) {
  config::Config config = timed_config();
  config.gemm.deterministic = true;
  config.gemm.sm_limit = 5;
  run(config);
  EXPECT_EQ(sim::blas_record().multiprocessors, 5);
  config.gemm.sm_limit = 0;
  run(config);
  EXPECT_EQ(sim::blas_record().multiprocessors, 0);
}

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
