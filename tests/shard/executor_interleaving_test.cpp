// The executor on the simulated device under many interleavings of its streams, and with waits left out.
#include <gtest/gtest.h>

#include <string>

#include "fixtures.h"
#include "ranks.h"
#include "shard/hazards.h"
#include "shard/waits.h"
#include "sim/control.h"
#include "toy.h"

namespace minillm::shard {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kRacesEndTheProgram = true;
#else
constexpr bool kRacesEndTheProgram = false;
#endif

using Waits = std::vector<std::vector<Wait>>;

constexpr int kSteps = 3;

class Interleaving : public testing::Test {
 protected:
  ~Interleaving() override { sim::set_streams("threads"); }

  ToyResult run(const std::string& mode, Policy policy = {}, const Waits* waits = nullptr) {
    sim::set_streams(mode);
    const OwnedCommunicators communicators;
    return run_toy(layout_, {policy, DType::kBf16, kSteps, ranks().rank(), communicators.get()}, waits);
  }

  // Whether the result of any rank differs from the reference for some seed. An operation has to overtake
  // several others for that, which takes up to 20 seeds for the waits asked about.
  bool shows(const Waits& waits) {
    for (int seed = 0; seed < 100; ++seed) {
      const bool differs = run("seed:" + std::to_string(seed), {}, &waits) != reference_;
      if (ranks().max(differs) != 0) return true;
    }
    return false;
  }

  Layout layout_ = make_layout(make_units(5, 19), ranks().size());
  ToyResult reference_ = toy_reference(layout_, ranks().rank(), kSteps);
};

TEST_F(Interleaving, SeededOrdersGiveEqualBits) {
  for (int seed = 0; seed < 12; ++seed)
    for (int slots : {2, 3})
      EXPECT_EQ(run("seed:" + std::to_string(seed), {slots, slots - 1}), reference_)
          << "seed " << seed << ", slots " << slots;
}

TEST_F(Interleaving, ThreadsGiveEqualBits) {
  for (int repeat = 0; repeat < 5; ++repeat) EXPECT_EQ(run("threads"), reference_) << repeat;
}

TEST_F(Interleaving, DelayedThreadsGiveEqualBits) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    sim::set_delay(seed);
    EXPECT_EQ(run("threads"), reference_) << seed;
  }
  sim::set_delay(std::nullopt);
}

TEST_F(Interleaving, EveryWaitLeftOutIsReportedAndThoseThatMoveDataShow) {
  const ToyProgram program(layout_, ranks().rank(), DType::kBf16, kSteps);
  const Schedule schedule = build_schedule(layout_, program, {});
  const Waits derived = derive_waits(schedule);
  int must_show = 0;
  for (size_t i = 0; i < derived.size(); ++i)
    for (size_t w = 0; w < derived[i].size(); ++w) {
      Waits waits = derived;
      waits[i].erase(waits[i].begin() + static_cast<std::ptrdiff_t>(w));
      EXPECT_FALSE(find_hazards(schedule, waits).empty());
      const Operation& waited = schedule.operations[static_cast<size_t>(derived[i][w].operation)];
      const OpKind from = waited.kind, to = schedule.operations[i].kind;
      const bool gathered = from == OpKind::kGather && (to == OpKind::kForward || to == OpKind::kBackward);
      const bool computed = from == OpKind::kBackward && to == OpKind::kReduceScatter;
      if ((!gathered && !computed) || kRacesEndTheProgram) continue;
      ++must_show;
      EXPECT_TRUE(shows(waits)) << describe(schedule.operations[i], {}) << " without its wait for "
                                << describe(waited, {});
    }
  EXPECT_EQ(must_show > 10, ranks().size() > 1 && !kRacesEndTheProgram);
}

// On a single rank only the norms overlap with compute.
TEST_F(Interleaving, NormsDoNotRunAheadOfTheGradients) {
  if (ranks().size() > 1 || kRacesEndTheProgram) GTEST_SKIP() << "for a single rank, without ThreadSanitizer";
  const ToyProgram program(layout_, 0, DType::kBf16, kSteps);
  const Schedule schedule = build_schedule(layout_, program, {});
  Waits waits = derive_waits(schedule);
  for (size_t i = 0; i < waits.size(); ++i)
    if (schedule.operations[i].kind == OpKind::kSquareNorm) waits[i].clear();
  EXPECT_TRUE(shows(waits));
}

}  // namespace
}  // namespace minillm::shard
