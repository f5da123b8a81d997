// What only the simulated device can show. The order in which a device happens to run things never changes a
// bit: streams under seeded interleavings and delayed, blocks and threads forward, reverse and shuffled. And
// the device itself counts memory, and what the host asks of it.
#include "core/error.h"
#include "sim/control.h"
#include "sim/counters.h"
#include "support.h"

namespace minillm::testing {
namespace {

constexpr uint64_t kSeeds = kSanitized ? 1 : 2;

/// A way to share the model and to launch its steps.
struct Way {
  const char* policy = "full";
  bool graph = false;
};
constexpr Way kWays[] = {{"full", false},   {"full", true},   {"grads", false},     {"grads", true},
                         {"hybrid", false}, {"hybrid", true}, {"replicate", false}, {"replicate", true}};

std::string name_of(const Way& way) {
  return std::string(way.policy) + (way.graph ? ", as graphs" : "");
}

config::Config config_of(const Way& way) {
  config::Config config = smallest_config();
  config.model.n_layers = 3;
  config.train.micro_batch /= world->size();
  config.parallel.policy = way.policy;
  if (std::string_view(way.policy) == "hybrid") config.parallel.group_size = world->size() % 2 == 0 ? 2 : 1;
  config.train.cuda_graph = way.graph;
  return config;
}

std::vector<double> losses(const Way& way = {}) {
  const config::Config config = config_of(way);
  train::Trainer trainer(config, *world);
  return train_losses(trainer, config, world->rank(), 3);
}

/// Losses do not depend on what `disturb` makes of the device; `restore` puts it back.
template <class Disturb, class Restore>
void expect_undisturbed(Disturb disturb, Restore restore) {
  uint64_t seed = static_cast<uint64_t>(world->size()) * 64;  // others for each number of ranks
  std::map<std::string, std::vector<double>> expected;
  for (const Way& way : kWays) {
    if (kThreadSanitized && way.graph) continue;  // which takes it minutes
    if (!expected.contains(way.policy)) expected[way.policy] = losses({way.policy});
    for (uint64_t i = 0; i < kSeeds; ++i, ++seed) {
      disturb(seed);
      EXPECT_EQ(losses(way), expected[way.policy]) << name_of(way) << ", seed " << seed;
      restore();
    }
  }
}

TEST(Interleaving, SeededStreamOrdersGiveTheSameLosses) {
  if (kSanitized) GTEST_SKIP() << "threads show sanitizers more";
  expect_undisturbed([](uint64_t seed) { sim::set_streams("seed:" + std::to_string(seed)); },
                     [] { sim::set_streams("threads"); });
}

// Each stream is late by turns, and differently on each rank.
TEST(Interleaving, DelayedStreamsGiveTheSameLosses) {
  expect_undisturbed([](uint64_t seed) { sim::set_delay(seed * 64 + static_cast<uint64_t>(world->rank())); },
                     [] { sim::set_delay(std::nullopt); });
}

TEST(Interleaving, BlockAndThreadOrdersGiveTheSameLosses) {
  if (kSanitized) GTEST_SKIP() << "the same accesses in another order";
  const std::vector<double> expected = losses();
  sim::set_order("reverse");
  EXPECT_EQ(losses(), expected);
  for (uint64_t seed = 1; seed <= 2; ++seed) {
    sim::set_order("shuffle:" + std::to_string(seed));
    EXPECT_EQ(losses(), expected) << "seed " << seed;
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

// The plan fits beside the reserve, and communicators take no more than that.
TEST(Memory, WhatCommunicatorsTakeComesOutOfTheReserve) {
  config::Config config = tiny_config();
  config.train.micro_batch /= world->size();
  const int64_t bytes = train::Trainer(config, *world).memory().bytes;
  config.memory.reserve = 1 << 20;
  const int64_t all = sim::settings().memory_bytes;
  sim::set_memory(sim::counters().allocated_bytes + bytes + config.memory.reserve);
  sim::set_nccl_buffers(config.memory.reserve / 2);  // of each of two
  EXPECT_NO_THROW(train::Trainer(config, *world));
  sim::set_nccl_buffers(0);
  ++config.memory.reserve;
  try {
    const train::Trainer trainer(config, *world);
    ADD_FAILURE() << "a byte too few";
  } catch (const MemoryError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("memory.reserve leaves 1048577"), std::string::npos) << text;
  }
  sim::set_memory(all);
}

// In steady state a step is nothing but work put on streams: what it needs exists, and the host waits for
// nothing but the read-back.
TEST(HostWork, StepsAllocateNothingAndWaitForNothing) {
  if (kSanitized) GTEST_SKIP() << "it counts";
  struct Difference {
    int64_t allocations, objects, host_waits;
    explicit Difference(const sim::Counters& before, const sim::Counters& after = sim::counters())
        : allocations(after.allocations - before.allocations),
          objects(after.objects - before.objects),
          host_waits(after.host_waits - before.host_waits) {}
  };
  for (const Way& way : kWays) {
    SCOPED_TRACE(name_of(way));
    config::Config config = config_of(way);
    if (!way.graph) config.train.grad_clip = 0.1;  // updates of both kinds
    train::Trainer trainer(config, *world);
    for (int64_t step = 0; step < 6; ++step) {
      fill_inputs(trainer, config, world->rank(), step);
      const sim::Counters before = sim::counters();
      trainer.enqueue(step);
      const Difference enqueued(before);
      // Weights are gathered ahead of the first step, and the second is captured.
      if (step == 0) {
        EXPECT_GT(enqueued.host_waits, 0);
      }
      if (step == 1) {
        EXPECT_EQ(enqueued.objects > 0, way.graph);
      }
      if (step >= 3) {
        EXPECT_EQ(enqueued.allocations, 0) << step;
        EXPECT_EQ(enqueued.objects, 0) << step;
        EXPECT_EQ(enqueued.host_waits, 0) << step;
      }
      if (step == 0) continue;
      const sim::Counters enqueued_both = sim::counters();
      trainer.result(step - 1);
      const Difference read(enqueued_both);
      EXPECT_EQ(read.host_waits, 1);
      EXPECT_EQ(read.allocations + read.objects, 0);
    }
  }
}

}  // namespace
}  // namespace minillm::testing

int main(int argc, char** argv) {
  return minillm::testing::run_tests(argc, argv);
}
