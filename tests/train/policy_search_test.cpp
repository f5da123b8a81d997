// "auto" takes what fits, and nothing that is slower than what fits, too.
#include "train/policy_search.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "core/format.h"
#include "support.h"
#include "tests/unit/errors.h"
#include "train/evaluation.h"

namespace minillm::train {
namespace {

using config::Recompute;
using minillm::test::expect_error;
using test::h100;
using test::node;
using test::reference;
using test::small;

config::Config automatic(std::vector<std::string> overrides = {}) {
  overrides.emplace_back("parallel.policy=auto");
  return reference(overrides);
}

/// Every policy with every recomputation, made here, not by the search.
std::vector<config::Config> plain_policies(const config::Config& base, const World& world) {
  std::vector<config::Config> list;
  for (const char* policy : {"full", "grads", "replicate", "hybrid"})
    for (const Recompute mode : {Recompute::kNone, Recompute::kCheap, Recompute::kBlock}) {
      config::Config config = base;
      config.parallel.policy = policy;
      config.memory.recompute = {mode};
      if (config.parallel.policy == "hybrid" && world.ranks % world.ranks_per_node != 0) continue;
      list.push_back(config);
    }
  return list;
}

/// What is wrong with a choice, empty: nothing.
std::string wrong(const config::Config& chosen, const config::Config& base, const World& world,
                  const shard::Hardware& hardware, int64_t bytes) {
  const Evaluation best = evaluate(chosen, world, hardware);
  if (best.plan.memory.bytes > bytes) return "does not fit";
  for (const config::Config& config : plain_policies(base, world)) {
    const Evaluation other = evaluate(config, world, hardware);
    if (other.plan.memory.bytes <= bytes && other.timeline.step_s < best.timeline.step_s)
      return "slower than " + config.parallel.policy + " " + name_of(config.memory.recompute.front());
  }
  return "";
}

struct Machine {
  const char* gpu;
  World world;
  double gigabytes;
};

TEST(PolicySearch, NothingThatFitsIsFaster) {
  const config::Config base = automatic();
  for (const Machine& m : {Machine{"h100", node(8), 80}, Machine{"h100", node(8), 5},
                           Machine{"h100", {.ranks = 64, .ranks_per_node = 8}, 9},
                           Machine{"rtx5090", {.ranks = 16, .ranks_per_node = 8}, 20},
                           Machine{"a100", node(3), 40}, Machine{"b200", node(1), 180}}) {
    SCOPED_TRACE(format("%d ranks of %s with %g GB", m.world.ranks, m.gpu, m.gigabytes));
    const shard::Hardware hardware = shard::hardware_by_name(m.gpu);
    const auto bytes = static_cast<int64_t>(m.gigabytes * 1e9);
    const PolicySearch search = search_policy(base, m.world, hardware, bytes);
    ASSERT_TRUE(search.best.has_value());
    const config::Config chosen = chosen_of(search, m.world, bytes);
    EXPECT_NE(chosen.parallel.policy, "auto");
    EXPECT_EQ(wrong(chosen, base, m.world, hardware, bytes), "");
    // Of those that a model cannot tell apart it takes the one that needs least memory.
    for (const Candidate& candidate : search.candidates) {
      EXPECT_EQ(candidate.fits, candidate.bytes <= bytes);
      EXPECT_TRUE(!candidate.fits || candidate.step_s * 1.001 >= search.candidates[*search.best].step_s);
    }
  }
}

TEST(PolicySearch, WrongChoicesAreFound) {
  const config::Config base = automatic();
  const int64_t bytes = 80'000'000'000;
  const config::Config slow = reference({"parallel.policy=full", "memory.recompute=block"});
  EXPECT_TRUE(wrong(slow, base, node(8), h100(), bytes).starts_with("slower than "));
  EXPECT_EQ(wrong(slow, base, node(8), h100(), 1'000'000'000), "does not fit");
}

TEST(PolicySearch, MemoryThatOnlyBlockRecomputationFits) {
  const int64_t block = make_step_plan(reference({"memory.recompute=block"}), node(8)).memory.bytes;
  const config::Config chosen = chosen_of(search_policy(automatic(), node(8), h100(), block), node(8), block);
  EXPECT_EQ(chosen.parallel.policy, "full");
  EXPECT_EQ(chosen.memory.recompute, std::vector{Recompute::kBlock});
}

// Between what all blocks need with one mode and with the next lie mixes: the first blocks, whose activations
// live longest, keep least, and no more of them than has to be.
TEST(PolicySearch, MemoryThatAMixFits) {
  const auto planned = [](const char* mode) {
    return make_step_plan(reference({std::string("memory.recompute=") + mode}), node(8)).memory.bytes;
  };
  const int64_t bytes = (planned("block") + planned("cheap")) / 2;
  const PolicySearch search = search_policy(automatic(), node(8), h100(), bytes);
  config::Config chosen = chosen_of(search, node(8), bytes);
  std::vector<Recompute>& modes = chosen.memory.recompute;
  ASSERT_EQ(modes.size(), 12u);
  const auto heavy = std::ranges::count(modes, Recompute::kBlock);
  EXPECT_GT(heavy, 0);
  EXPECT_LT(heavy, 12);
  EXPECT_TRUE(std::ranges::is_sorted(modes, std::ranges::greater{})) << "the first blocks keep least";
  const Evaluation mix = evaluate(chosen, node(8), h100());
  EXPECT_LE(mix.plan.memory.bytes, bytes);
  EXPECT_LT(mix.timeline.step_s,
            evaluate(reference({"memory.recompute=block"}), node(8), h100()).timeline.step_s);
  modes[static_cast<size_t>(heavy - 1)] = Recompute::kCheap;
  EXPECT_GT(make_step_plan(chosen, node(8)).memory.bytes, bytes) << "one block fewer is too few";
  EXPECT_NE(search.table().find(format("%ldx block", static_cast<long>(heavy))), std::string::npos);
}

// On a slow network the head's gradients have to leave early, and memory is there: all logits at once.
TEST(PolicySearch, AllLogitsWhereThatIsFaster) {
  const World world{.ranks = 64, .ranks_per_node = 1};
  shard::Hardware hardware = h100();
  hardware.link->ranks = 1;
  hardware.network->bytes_per_s = 45e9;
  const int64_t bytes = 9'000'000'000;
  const auto chosen = [&](const std::vector<std::string>& overrides, int64_t within) {
    return chosen_of(search_policy(automatic(overrides), world, hardware, within), world, within);
  };
  const config::Config all = chosen({}, bytes);
  EXPECT_EQ(all.train.head_chunk, 8 * 1024);
  config::Config chunks = all;
  chunks.train.head_chunk = 0;
  const Evaluation with = evaluate(all, world, hardware), without = evaluate(chunks, world, hardware);
  EXPECT_LT(with.timeline.step_s, 0.99 * without.timeline.step_s);
  EXPECT_GT(with.plan.memory.bytes, without.plan.memory.bytes);
  EXPECT_LE(evaluate(chosen({}, with.plan.memory.bytes - 1), world, hardware).plan.memory.bytes,
            with.plan.memory.bytes - 1);
  EXPECT_EQ(chosen({}, 2'100'000'000).train.head_chunk, 0) << "there is no memory for all logits";
  EXPECT_EQ(chosen({"train.head_chunk=512"}, bytes).train.head_chunk, 512) << "what is given is taken";
  const std::string table = search_policy(automatic(), world, hardware, bytes).table();
  const size_t best = table.find("\n>");
  ASSERT_NE(best, std::string::npos);
  EXPECT_NE(table.substr(best, table.find('\n', best + 1) - best).find(" all "), std::string::npos);
  EXPECT_NE(table.find(" 2048 rows "), std::string::npos);
}

TEST(PolicySearch, TheTableMarksTheBest) {
  const PolicySearch search = search_policy(automatic(), node(8), h100(), 7'000'000'000);
  const std::string table = search.table();
  ASSERT_TRUE(search.best.has_value());
  EXPECT_EQ(static_cast<size_t>(std::ranges::count(table, '\n')), search.candidates.size() + 1);
  EXPECT_EQ(std::ranges::count(table, '>'), 1);
  const size_t marked = static_cast<size_t>(
      std::count(table.begin(), table.begin() + static_cast<std::ptrdiff_t>(table.find('>')), '\n'));
  EXPECT_EQ(marked, *search.best + 1);
  EXPECT_NE(table.find("does not fit"), std::string::npos);
}

TEST(PolicySearch, RanksChooseAlike) {
  const auto table = [] { return search_policy(automatic(), node(4), h100(), 9'000'000'000).table(); };
  EXPECT_EQ(table(), table());
}

TEST(PolicySearch, NothingFits) {
  const int64_t bytes = 1'000'000'000;
  const PolicySearch search = search_policy(automatic(), node(8), h100(), bytes);
  EXPECT_FALSE(search.best.has_value());
  EXPECT_EQ(std::ranges::count(search.table(), '>'), 0);
  expect_error<MemoryError>([&] { chosen_of(search, node(8), bytes); },
                            {"no policy fits 1000000000 bytes", "replicate", "does not fit",
                             "smallest is --set parallel.policy=full --set memory.recompute=block"});
}

// bf16 reductions rule out replication; a single rank has one policy.
TEST(PolicySearch, TriesWhatGoesTogether) {
  const auto tried = [](const std::vector<std::string>& overrides, const World& world, const char* policy) {
    std::vector<std::string> all = overrides;
    all.emplace_back("parallel.policy=auto");
    const PolicySearch search = search_policy(small(all), world, h100(), 80'000'000'000);
    return std::ranges::any_of(search.candidates,
                               [&](const Candidate& c) { return c.config.parallel.policy == policy; });
  };
  EXPECT_TRUE(tried({}, node(4), "replicate"));
  EXPECT_FALSE(tried({"precision.reduce=bf16"}, node(4), "replicate"));
  EXPECT_TRUE(tried({}, node(1), "full"));
  for (const char* policy : {"grads", "replicate", "hybrid"})
    EXPECT_FALSE(tried({}, node(1), policy)) << policy;
}

}  // namespace
}  // namespace minillm::train
