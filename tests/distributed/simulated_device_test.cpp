// What only the simulated device can show. The order in which a device happens to run things never changes a
// bit: streams under seeded interleavings, blocks and threads forward, reverse and shuffled. And the
// device itself counts memory.
#include "sim/control.h"
#include "sim/counters.h"
#include "support.h"

namespace minillm::testing {
namespace {

// Interleavings for each number of ranks, other ones for each. Sanitizers find what is not ordered in any of
// them.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSeeds = 2;
#else
constexpr int kSeeds = 4;
#endif

std::vector<double> losses(DType dtype) {
  config::Config config = tiny_config();
  config.train.micro_batch /= world->size();
  config.precision.param = dtype;
  train::Trainer trainer(config, *world);
  return train_losses(trainer, config, world->rank(), 3);
}

TEST(Interleaving, SeededStreamOrdersGiveTheSameLosses) {
  const std::vector<double> expected = losses(DType::kBf16);
  const int first = kSeeds * (world->size() - 1);
  for (int seed = first; seed < first + kSeeds; ++seed) {
    sim::set_streams("seed:" + std::to_string(seed));
    EXPECT_EQ(losses(DType::kBf16), expected) << "seed " << seed;
  }
  sim::set_streams("threads");
}

TEST(Interleaving, BlockAndThreadOrdersGiveTheSameLosses) {
  const std::vector<double> expected = losses(DType::kBf16);
  sim::set_order("reverse");
  EXPECT_EQ(losses(DType::kBf16), expected);
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    sim::set_order("shuffle:" + std::to_string(seed));
    EXPECT_EQ(losses(DType::kBf16), expected) << "seed " << seed;
  }
  sim::set_order("forward");
}

TEST(Memory, TheDeviceMeasuresThePlannedPeak) {
  config::Config config = tiny_config();
  config.train.micro_batch /= world->size();
  sim::reset_counters();
  const int64_t before = sim::counters().allocated_bytes;
  train::Trainer trainer(config, *world);
  train_losses(trainer, config, world->rank(), 2);
  EXPECT_EQ(sim::counters().peak_bytes - before, trainer.memory().bytes);
}

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
