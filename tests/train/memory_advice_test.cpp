// Each piece of advice is taken as a user would take it: through --set.
#include "train/memory_advice.h"

#include <gtest/gtest.h>

#include <functional>
#include <regex>

#include "core/format.h"
#include "support.h"

namespace minillm::train {
namespace {

using test::node;
using test::reference;

using Overrides = std::vector<std::string>;

int64_t planned(const Overrides& overrides, const World& world) {
  return make_step_plan(reference(overrides), world).memory.bytes;
}

Overrides joined(Overrides overrides, const Overrides& more) {
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

Overrides settings_in(const std::string& advice) {
  Overrides settings;
  const std::regex expression("--set ([a-z_.]+=[a-z0-9]+)");
  for (std::sregex_iterator at(advice.begin(), advice.end(), expression), end; at != end; ++at)
    settings.push_back(at->str(1));
  return settings;
}

/// What is wrong with advice for `given`, empty: nothing. Settings have to fit, and each has to be needed; a
/// policy comes with its group size.
std::string wrong(const std::string& advice, const Overrides& given, const World& world, int64_t bytes) {
  const Overrides settings = settings_in(advice);
  if (settings.empty()) return advice.find("No setting makes it fit") == std::string::npos ? "no advice" : "";
  if (planned(joined(given, settings), world) > bytes) return "does not fit";
  for (size_t without = 0; without < settings.size(); ++without) {
    if (settings[without] == "parallel.group_size=0" || settings[without] == "parallel.policy=full") continue;
    Overrides fewer = settings;
    fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(without));
    if (planned(joined(given, fewer), world) <= bytes) return settings[without] + " is not needed";
  }
  return "";
}

struct Case {
  Overrides given;
  World world;
};

const std::vector<Case> kCases = {
    {{"memory.recompute=none"}, node(4)},
    {{"parallel.policy=grads", "parallel.gradient_slots=14", "memory.recompute=none"}, node(4)},
    {{"parallel.weight_slots=8"}, node(4)},
    {{"parallel.policy=replicate"}, node(4)},
    {{"parallel.policy=hybrid", "parallel.group_size=2"}, node(8)},
    {{"train.grad_accumulation=2", "parallel.reduce_every_micro_batch=false"}, node(4)},
    {{}, node(1)},
};

TEST(MemoryAdvice, FitsAndIsMinimal) {
  size_t with_settings = 0, with_several = 0;
  for (size_t i = 0; i < kCases.size(); ++i) {
    const auto& [given, world] = kCases[i];
    const int64_t needed = planned(given, world);
    for (const double part : {0.95, 0.8, 0.6, 0.4, 0.2}) {
      SCOPED_TRACE(format("case %zu with %g of the memory it needs", i, part));
      const auto bytes = static_cast<int64_t>(part * static_cast<double>(needed));
      const std::string advice = advise_on_memory(reference(given), world, bytes);
      EXPECT_EQ(wrong(advice, given, world, bytes), "") << advice;
      with_settings += settings_in(advice).empty() ? 0 : 1;
      with_several += settings_in(advice).size() > 1 ? 1 : 0;
    }
  }
  EXPECT_GT(with_settings, kCases.size()) << "cases that say little";
  EXPECT_GT(with_several, 0u);
}

TEST(MemoryAdvice, WrongAdviceIsFound) {
  const Overrides given = {"memory.recompute=none"};
  const int64_t bytes = planned({"memory.recompute=cheap"}, node(4));
  EXPECT_EQ(wrong("--set memory.recompute=cheap.", given, node(4), bytes), "");
  EXPECT_EQ(wrong("--set precision.moments=bf16.", given, node(4), bytes), "does not fit");
  EXPECT_EQ(wrong("--set memory.recompute=cheap --set precision.moments=bf16.", given, node(4), bytes),
            "precision.moments=bf16 is not needed");
  EXPECT_EQ(wrong("Buy memory.", given, node(4), bytes), "no advice");
}

// Settings that cost no time come before those that do.
TEST(MemoryAdvice, TheCheapestComesFirst) {
  const Overrides slots = {"parallel.policy=grads", "parallel.gradient_slots=14", "train.micro_batch=1"};
  const int64_t needed = planned(slots, node(4));
  EXPECT_EQ(settings_in(advise_on_memory(reference(slots), node(4), needed - 1)),
            Overrides{"parallel.gradient_slots=0"});
  const Overrides none = {"memory.recompute=none"};
  EXPECT_EQ(settings_in(advise_on_memory(reference(none), node(4), planned(none, node(4)) - 1)),
            Overrides{"memory.recompute=cheap"});
}

TEST(MemoryAdvice, TellsTheLargestMicroBatch) {
  const int64_t bytes = planned({"train.micro_batch=5"}, node(4));
  const std::string advice = advise_on_memory(reference(), node(4), bytes);
  EXPECT_NE(advice.find("largest train.micro_batch that fits is 5."), std::string::npos) << advice;
  const std::string none = advise_on_memory(reference(), node(4), 1 << 20);
  EXPECT_NE(none.find("Not even train.micro_batch 1 fits. No setting"), std::string::npos) << none;
}

}  // namespace
}  // namespace minillm::train
