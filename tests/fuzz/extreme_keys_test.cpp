// Every value that the table of keys allows either works or is refused with words: what a user writes ends in
// no overflow, no exhausted memory and no internal error.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "config/schema.h"
#include "core/error.h"
#include "core/format.h"
#include "tests/train/support.h"
#include "train/evaluation.h"

namespace minillm::train {
namespace {

using test::h100;

constexpr int kMostRanks = 1 << 20;  // of `minillm plan`

/// Plans a step as `minillm plan` does. False when the configuration is refused as a user's mistake.
bool plans(const std::vector<std::string>& overrides, int ranks) {
  SCOPED_TRACE(::testing::PrintToString(overrides) + " on " + std::to_string(ranks) + " ranks");
  try {
    shard::Hardware hardware = h100();
    hardware.network = shard::Network{.latency_s = 1e-5, .bytes_per_s = 1e10};
    const Evaluation step = evaluate(test::small(overrides), {.ranks = ranks, .ranks_per_node = 8}, hardware);
    EXPECT_GT(step.plan.memory.bytes, 0);
    EXPECT_TRUE(std::isfinite(step.timeline.step_s) && step.timeline.step_s > 0) << step.timeline.step_s;
    return true;
  } catch (const UsageError& error) {
    return false;
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
    return false;
  }
}

TEST(ExtremeHardware, TimesStayFinite) {
  for (const double rate : {1.0, 1e30})
    for (const double seconds : {0.0, 1e6})
      for (const int64_t ranks : {int64_t{1}, int64_t{1} << 20}) {
        shard::Hardware hardware = h100();
        for (double* figure :
             {&hardware.gemm_flops_per_s, &hardware.attention_flops_per_s, &hardware.memory_bytes_per_s})
          *figure = rate;
        hardware.kernel_s = seconds;
        hardware.link = {.latency_s = seconds, .bytes_per_s = rate, .ranks = ranks};
        hardware.network = {.latency_s = seconds, .bytes_per_s = rate};
        // What a file may say.
        EXPECT_NO_THROW((void)shard::parse_hardware(shard::to_json(hardware), "extreme"));
        const Evaluation step =
            evaluate(test::small(), {.ranks = 16, .ranks_per_node = static_cast<int>(ranks)}, hardware);
        EXPECT_TRUE(std::isfinite(step.timeline.step_s)) << rate << " " << seconds << " " << ranks;
        EXPECT_GE(step.timeline.step_s, 0);
      }
}

/// KEY=VALUE for the least and the most of what a key allows.
std::vector<std::string> extremes() {
  std::vector<std::string> settings;
  config::for_each_key(
      config::Config{}, [&](const std::string& key, const auto&, const auto& allowed, auto&&) {
        using Allowed = std::decay_t<decltype(allowed)>;
        if constexpr (std::is_same_v<Allowed, config::Integer>) {
          settings.push_back(key + "=" + std::to_string(allowed.least));
          settings.push_back(key + "=" + std::to_string(allowed.most));
        } else if constexpr (std::is_same_v<Allowed, config::Real>) {
          settings.push_back(key + "=" + format("%.17g", allowed.least));
          settings.push_back(
              key + "=" +
              format("%.17g", allowed.most_excluded ? std::nextafter(allowed.most, 0) : allowed.most));
        }
      });
  return settings;
}

/// What the extreme value of a key needs from others.
std::vector<std::string> with_what_it_needs(const std::string& setting) {
  std::vector<std::string> settings{setting};
  const auto is = [&](const char* key) { return setting.starts_with(std::string(key) + "="); };
  if (is("model.dim"))
    settings.push_back(setting == "model.dim=8" ? "model.n_heads=1" : "model.n_heads=8192");
  if (is("model.n_heads"))
    settings.push_back(setting == "model.n_heads=1" ? "model.dim=128" : "model.dim=1048576");
  if (is("model.n_layers")) settings.push_back("memory.recompute=block");
  if (is("train.micro_batch")) settings.push_back("train.seq_len=127");
  if (is("train.seq_len")) settings.push_back("train.micro_batch=1");
  if (is("train.grad_accumulation")) settings.push_back("model.n_layers=1");
  if (is("parallel.group_size")) settings.push_back("parallel.policy=hybrid");
  return settings;
}

TEST(ExtremeKeys, EachWorksAlone) {
  for (const std::string& setting : extremes())
    EXPECT_TRUE(
        plans(with_what_it_needs(setting), setting.starts_with("parallel.group_size") ? kMostRanks : 2))
        << setting;
}

TEST(ExtremeKeys, SizesTogetherWorkOrAreRefused) {
  const std::vector<std::vector<std::string>> sizes = {
      {"model.vocab_size=1", "model.vocab_size=2147483584"},
      {"model.dim=8", "model.dim=1048576"},
      {"model.ffn_dim=1", "model.ffn_dim=16777216"},
      {"train.micro_batch=1", "train.micro_batch=16777216"},
      {"train.seq_len=1", "train.seq_len=16777216", "train.seq_len=127"},
      {"train.head_chunk=1", "train.head_chunk=0", "train.head_chunk=2147483647"},
      {"precision.param=fp32", "precision.param=bf16"}};
  std::vector<std::vector<std::string>> all{{"model.n_layers=1"}};
  for (const auto& values : sizes) {
    std::vector<std::vector<std::string>> longer;
    for (const auto& settings : all)
      for (const std::string& value : values) {
        longer.push_back(settings);
        longer.back().push_back(value);
        if (value == "model.dim=8") longer.back().push_back("model.n_heads=1");
        if (value == "model.dim=1048576") longer.back().push_back("model.n_heads=8192");
      }
    all = std::move(longer);
  }
  int works = 0;
  for (const auto& settings : all)
    for (const int ranks : {1, 3, kMostRanks}) works += plans(settings, ranks);
  EXPECT_GT(works, 100);
}

}  // namespace
}  // namespace minillm::train
