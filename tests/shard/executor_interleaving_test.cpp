// The executor on the simulated device under many interleavings of its streams, and with waits left out.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "fixtures.h"
#include "ranks.h"
#include "shard/hazards.h"
#include "shard/waits.h"
#include "sim/control.h"
#include "tests/sanitizers.h"
#include "toy.h"
#include "toy_policies.h"

namespace minillm::shard {
namespace {

using test::kSanitized;
using test::kThreadSanitized;
using Waits = std::vector<std::vector<Wait>>;

constexpr int kSteps = 3;

class Interleaving : public testing::Test {
 protected:
  ~Interleaving() override {
    sim::set_delay(std::nullopt);
    sim::set_streams("threads");
  }

  static ToyResult run(const std::string& mode, const NamedPolicy& named, Launch launch = Launch::kEager) {
    sim::set_streams(mode);
    const OwnedCommunicators communicators(named.shards);
    return run_toy(layout_of(named),
                   {named.policy, named.type, kSteps, ranks().rank(), communicators.get(), launch});
  }

  static ToyResult reference(const NamedPolicy& named) {
    return toy_reference(layout_of(named), named.policy, ranks().rank(), kSteps);
  }
};

TEST_F(Interleaving, SeededOrdersGiveEqualBitsForEveryPolicy) {
  if (kSanitized) GTEST_SKIP() << "threads show sanitizers more";
  const int repetitions = ranks().size() > 2 ? 1 : 3;
  int seed = 0;
  for (const NamedPolicy& named : toy_policies(ranks().size()))
    for (int repeat = 0; repeat < repetitions; ++repeat, ++seed)
      EXPECT_EQ(run("seed:" + std::to_string(seed), named), reference(named))
          << named.name << ", seed " << seed;
}

// ThreadSanitizer watches this one: streams are threads, and each policy runs; as a graph there only some do,
// since a fiber costs it a hundred times its time.
TEST_F(Interleaving, DelayedThreadsGiveEqualBitsForEveryPolicy) {
  std::set<std::string> policies;
  uint64_t seed = 0;
  for (const NamedPolicy& named : toy_policies(ranks().size())) {
    const bool graph = !kThreadSanitized || policies.size() % 4 == 0;
    for (Launch launch : {Launch::kEager, Launch::kGraph}) {
      if (launch == Launch::kGraph && !graph) continue;
      if (seed % 2 == 0) sim::set_delay(seed);
      EXPECT_EQ(run("threads", named, launch), reference(named)) << named.name << ", seed " << seed;
      sim::set_delay(std::nullopt);
      ++seed;
    }
    policies.insert(named.name);
  }
  EXPECT_GE(policies.size(), ranks().size() > 1 ? 21u : 15u);
}

// The default policy with waits left out, for units of one segment: fewer operations have to overtake others.
class LeftOut : public Interleaving {
 protected:
  // Whether the result of any rank differs from the reference for some seed, which takes up to 20 seeds for
  // the waits asked about.
  bool shows(const Waits& waits) const {
    for (int seed = 0; seed < 200; ++seed) {
      sim::set_streams("seed:" + std::to_string(seed));
      const OwnedCommunicators communicators(ranks().size());
      const bool differs =
          run_toy(layout_, {policy_, DType::kBf16, kSteps, ranks().rank(), communicators.get()}, &waits) !=
          reference_;
      if (ranks().max(differs) != 0) return true;
    }
    return false;
  }

  const Policy policy_;
  const Layout layout_ = make_layout(make_units(kToyBlocks, kToyDim), ranks().size());
  const ToyResult reference_ = toy_reference(layout_, policy_, ranks().rank(), kSteps);
  const Schedule schedule_ =
      build_schedule(layout_, ToyProgram(layout_, policy_, ranks().rank(), DType::kBf16, kSteps), policy_);
  const Waits derived_ = derive_waits(schedule_);
};

// Waits for what moves data between streams. The others guard what only a rarer order of streams overwrites;
// that each is missed is the business of find_hazards.
bool must_show(OpKind awaited, OpKind waiting) {
  const bool gathered = awaited == OpKind::kGather && waiting == OpKind::kForward;
  const bool computed = awaited == OpKind::kBackward && waiting == OpKind::kReduceScatter;
  const bool updated = awaited == OpKind::kUpdate && waiting == OpKind::kGather;
  const bool reduced = awaited == OpKind::kReduceScatter && waiting == OpKind::kSquareNorm;
  return gathered || computed || updated || reduced;
}

TEST_F(LeftOut, EveryWaitIsReportedAndThoseThatMoveDataShow) {
  if (ranks().size() != 2 || kSanitized) GTEST_SKIP() << "two ranks show it, and sanitizers end the program";
  std::set<std::pair<OpKind, OpKind>> shown;
  for (size_t i = 0; i < derived_.size(); ++i)
    for (size_t w = 0; w < derived_[i].size(); ++w) {
      Waits waits = derived_;
      waits[i].erase(waits[i].begin() + static_cast<std::ptrdiff_t>(w));
      EXPECT_FALSE(find_hazards(schedule_, waits).empty());
      const Operation& waited = schedule_.operations[static_cast<size_t>(derived_[i][w].operation)];
      const std::pair kinds(waited.kind, schedule_.operations[i].kind);
      if (!must_show(kinds.first, kinds.second)) continue;
      shown.insert(kinds);
      EXPECT_TRUE(shows(waits)) << describe(schedule_.operations[i], {}) << " without its wait for "
                                << describe(waited, {});
    }
  EXPECT_EQ(shown.size(), 4u);
}

// On a single rank only norms and updates overlap with compute.
TEST_F(LeftOut, NormsDoNotRunAheadOfTheGradients) {
  if (ranks().size() > 1 || kSanitized) GTEST_SKIP() << "for a single rank; sanitizers end the program";
  Waits waits = derived_;
  for (size_t i = 0; i < waits.size(); ++i)
    if (schedule_.operations[i].kind == OpKind::kSquareNorm) waits[i].clear();
  EXPECT_TRUE(shows(waits));
}

}  // namespace
}  // namespace minillm::shard
