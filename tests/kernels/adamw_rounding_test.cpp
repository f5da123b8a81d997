// AdamW with bf16 moments: stochastic rounding is unbiased, independent where it must be, and a function of
// (seed, step, element of the model, moment) only.
#include <set>
#include <tuple>

#include "kernels/adamw.h"
#include "kernels/device/rng.h"
#include "tests/kernels/masters.h"

namespace minillm::kernels::testing {
namespace {

constexpr int64_t kDraws = kThreadSanitized ? 20'000 : 100'000;

struct Settings {
  uint64_t seed = 1;
  int64_t step = 1, first_element = 0;
  double beta1 = 0.9, beta2 = 0.999;
};

struct State {
  State(int64_t count, float moment, int64_t offset = 0)
      : master(std::vector<float>(count, 0.5f), true, offset),
        moment1(DType::kBf16, std::vector<float>(count, moment), offset),
        moment2(DType::kBf16, std::vector<float>(count, moment), offset) {}
  Masters master;
  Tensor moment1, moment2;
};

/// Updates elements [first, first + count) of the state; settings.first_element is that of the state.
void update(const State& state, const DeviceArray<float>& gradient, const Settings& settings, int64_t first,
            int64_t count) {
  const DeviceArray<float> scale(std::vector<float>{1});
  const AdamWOptions options = {
      .beta1 = settings.beta1, .beta2 = settings.beta2, .epsilon = 1e-8, .weight_decay = 0.01};
  const DeviceArray<AdamWStep> step(std::vector<AdamWStep>{adamw_step(options, 1e-3, settings.step)});
  adamw({.parameter = state.master.parameter(first),
         .lower_half = state.master.lower_half(first),
         .moment1 = state.moment1.as<uint16_t>() + first,
         .moment2 = state.moment2.as<uint16_t>() + first,
         .gradient = gradient.get() + first,
         .gradient_scale = scale.get(),
         .step = step.get(),
         .count = count,
         .options = options,
         .moment_type = DType::kBf16,
         .seed = settings.seed,
         .first_element = settings.first_element + first},
        nullptr);
  check(cudaDeviceSynchronize());
}

struct Moments {
  std::vector<float> m, v;
};

/// The moments after one update from zero with the same gradient everywhere.
Moments draw(float gradient, const Settings& settings, int64_t count = kDraws) {
  const State state(count, 0);
  update(state, DeviceArray<float>(std::vector<float>(count, gradient)), settings, 0, count);
  return {state.moment1.values(), state.moment2.values()};
}

double mean(const std::vector<float>& values) {
  double sum = 0;
  for (const float v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

/// Correlation of "rounded up" in two sets of draws, the second shifted by `shift` elements.
double correlation(const std::vector<float>& a, const std::vector<float>& b, int64_t shift = 0) {
  const auto [low_a, high_a] = std::ranges::minmax(a);
  const auto [low_b, high_b] = std::ranges::minmax(b);
  const int64_t count = std::ssize(a) - shift;
  double sum_a = 0, sum_b = 0, sum_ab = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool up_a = a[i] == high_a && high_a != low_a, up_b = b[i + shift] == high_b && high_b != low_b;
    sum_a += up_a;
    sum_b += up_b;
    sum_ab += up_a && up_b;
  }
  const double n = static_cast<double>(count), p = sum_a / n, q = sum_b / n;
  return (sum_ab / n - p * q) / std::sqrt(p * (1 - p) * q * (1 - q));
}

// Five standard deviations of the correlation of independent draws.
const double kUncorrelated = 5 / std::sqrt(static_cast<double>(kDraws));

constexpr float kGradient = 1.2345f;  // 0.1 · g and 0.001 · g² lie between two bf16 numbers

TEST(StochasticRounding, UpAsOftenAsTheFractionSays) {
  for (const float value : {1.0f, 1.2345678f, -3.14159f, 1e-40f, -0x1p-149f, 0.0f}) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    int64_t up = 0;
    for (uint32_t random = 0; random < 1 << 16; ++random) {
      const uint16_t result = stochastic_bf16(bits, random);
      ASSERT_TRUE(result == bits >> 16 || result == (bits >> 16) + 1) << value;
      up += result != bits >> 16;
    }
    EXPECT_EQ(up, bits & 0xffff) << value << ": of 65536, exactly the bits that are cut off";
  }
}

TEST(StochasticRounding, Trap13_NotFiniteStaysAndFiniteStaysFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const uint32_t random : {0u, 1u, 0xffffu}) {
    const auto round = [random](float value) {
      return bf16_to_float(stochastic_bf16(std::bit_cast<uint32_t>(value), random));
    };
    EXPECT_EQ(round(infinity), infinity);
    EXPECT_EQ(round(-infinity), -infinity);
    EXPECT_TRUE(std::isnan(round(NAN)));
    EXPECT_TRUE(std::isnan(bf16_to_float(stochastic_bf16(0x7f800001, random)))) << "a NaN of low bits only";
    EXPECT_TRUE(std::isnan(bf16_to_float(stochastic_bf16(0xffffffff, random))));
    EXPECT_EQ(round(std::numeric_limits<float>::max()), bf16_to_float(0x7f7f));
    EXPECT_EQ(round(std::numeric_limits<float>::lowest()), bf16_to_float(0xff7f));
  }
}

TEST(StochasticRounding, Trap13_NoTwoDrawsAreTheSame) {
  std::set<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> seen;
  int64_t draws = 0;
  const auto add = [&](const PhiloxWords& w) {
    seen.emplace(w.word[0], w.word[1], w.word[2], w.word[3]);
    ++draws;
  };
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32})
    for (const int64_t step : {int64_t{1}, int64_t{2}, int64_t{1} << 32})
      for (const int64_t first : {int64_t{0}, int64_t{1} << 32})
        for (int64_t group = first; group < first + 500; ++group) add(rounding_words(seed, step, group));
  for (int64_t counter = 0; counter < 500; ++counter) add(philox(1, 1, counter));  // as for initial values
  EXPECT_EQ(std::ssize(seen), draws);
}

// The mean of 1e5 draws is the value to 2e-4, which rounding to nearest misses.
TEST(AdamWRounding, Trap13_Unbiased) {
  const double m = 0.1 * kGradient, v = 0.001 * kGradient * kGradient;
  for (const int64_t step : {1, 2, 3}) {
    const Moments drawn = draw(kGradient, {.step = step});
    EXPECT_NEAR(mean(drawn.m) / m, 1, 2e-4);
    EXPECT_NEAR(mean(drawn.v) / v, 1, 2e-4);
  }
  const auto nearest = [](double value) { return rounded(static_cast<float>(value), DType::kBf16); };
  EXPECT_GT(std::abs(nearest(m) / m - 1), 4e-4) << "the value says nothing about rounding";
  EXPECT_GT(std::abs(nearest(v) / v - 1), 4e-4) << "the value says nothing about rounding";
}

TEST(AdamWRounding, Trap13_MomentsElementsStepsAndSeedsAreIndependent) {
  const Moments one = draw(kGradient, {}), next_step = draw(kGradient, {.step = 2});
  const Moments other_seed = draw(kGradient, {.seed = 2}),
                next_shard = draw(kGradient, {.first_element = kDraws});
  EXPECT_EQ(std::lround(correlation(one.m, one.m)), 1) << "planted: the same draws must be seen";
  EXPECT_LT(std::abs(correlation(one.m, one.v)), kUncorrelated) << "m and v of an element";
  EXPECT_LT(std::abs(correlation(one.m, next_step.m)), kUncorrelated) << "steps";
  EXPECT_LT(std::abs(correlation(one.v, next_step.v)), kUncorrelated) << "steps";
  EXPECT_LT(std::abs(correlation(one.v, next_step.m)), kUncorrelated) << "steps and moments";
  EXPECT_LT(std::abs(correlation(one.m, other_seed.m)), kUncorrelated) << "seeds";
  EXPECT_LT(std::abs(correlation(one.m, next_shard.m)), kUncorrelated) << "shards";
  for (const int64_t distance : {1, 2, 3, 4, 128, 1024}) {
    EXPECT_LT(std::abs(correlation(one.m, one.m, distance)), kUncorrelated) << distance << " elements apart";
    EXPECT_LT(std::abs(correlation(one.v, one.v, distance)), kUncorrelated) << distance << " elements apart";
  }
}

TEST(AdamWRounding, Trap13_Replay) {
  constexpr int64_t kCount = 1025;
  const Settings settings = {.seed = 7, .step = 3, .first_element = 40};
  const Moments one = draw(kGradient, settings, kCount), again = draw(kGradient, settings, kCount);
  expect_same_bits("moment1", one.m, again.m);
  expect_same_bits("moment2", one.v, again.v);
  for (const Settings& other :
       {Settings{8, 3, 40}, Settings{7, 4, 40}, Settings{7, 3, 44}, Settings{7, 3, 40 + (int64_t{1} << 33)},
        Settings{7 + (uint64_t{1} << 33), 3, 40}})
    EXPECT_NE(draw(kGradient, other, kCount).m, one.m);
}

// However the model is cut into launches, and however these lie in memory.
TEST(AdamWRounding, Trap13_RangesDoNotMatter) {
  constexpr int64_t kCount = 1000;
  const DeviceArray<float> gradient(normal_values(kCount, 4));
  const Settings settings = {.seed = 5, .step = 2, .first_element = (int64_t{1} << 32) + 8};
  const State whole(kCount, 0.125f);
  update(whole, gradient, settings, 0, kCount);
  for (const int64_t offset : {0, 1})
    for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, kCount},
                                             {0, 333, kCount},
                                             {0, 4, 512, kCount},
                                             {0, 1, 2, 3, 7, 998, kCount}}) {
      const State cut(kCount, 0.125f, offset);
      for (size_t i = 0; i + 1 < cuts.size(); ++i)
        update(cut, gradient, settings, cuts[i], cuts[i + 1] - cuts[i]);
      expect_same_bits("master", whole.master.values(), cut.master.values());
      expect_same_bits("moment1", whole.moment1.read(), cut.moment1.read());
      expect_same_bits("moment2", whole.moment2.read(), cut.moment2.read());
    }
}

// A shard that begins within a group of elements that share random words, in memory of its own, aligned.
TEST(AdamWRounding, Trap13_ShardsBeginAnywhere) {
  constexpr int64_t kCount = 1000;
  const Moments whole = draw(kGradient, {}, kCount);
  for (const int64_t first : {1, 2, 3, 4, 333}) {
    const Moments shard = draw(kGradient, {.first_element = first}, kCount - first);
    expect_same_bits("moment1", shard.m, std::vector<float>(whole.m.begin() + first, whole.m.end()));
    expect_same_bits("moment2", shard.v, std::vector<float>(whole.v.begin() + first, whole.v.end()));
  }
}

/// Against float64 with the moments that the device had before the step: parameters as with fp32 moments,
/// moments within one bf16 number.
TEST(AdamWRounding, MatchesFloat64) {
  for (const int64_t count : {1, 7, 33, 1025, 4096}) {
    const State state(count, 0);
    for (int64_t step = 1; step <= 4; ++step) {
      const std::vector<float> gradient = normal_values(count, static_cast<uint32_t>(20 + step));
      std::vector<double> p, m, v;
      const std::vector<float> p0 = state.master.values(), m0 = state.moment1.values(),
                               v0 = state.moment2.values();
      for (int64_t i = 0; i < count; ++i) {
        const double g = gradient[i];
        m.push_back(m0[i] + 0.1 * (g - m0[i]));
        v.push_back(0.999 * v0[i] + 0.001 * g * g);
        const double step_size = 1e-3 / (1 - std::pow(0.9, step)),
                     root = std::sqrt(1 - std::pow(0.999, step));
        p.push_back(p0[i] * (1 - 1e-5) - step_size * m.back() / (std::sqrt(v.back()) / root + 1e-8));
      }
      update(state, DeviceArray<float>(gradient), {.step = step}, 0, count);
      EXPECT_LE(largest_error(state.master.values(), p, DType::kFp32).units, 4) << "step " << step;
      EXPECT_LE(largest_error(state.moment1.values(), m, DType::kBf16).units, 1.01) << "step " << step;
      EXPECT_LE(largest_error(state.moment2.values(), v, DType::kBf16).units, 1.01) << "step " << step;
      expect_same_bits("parameter", state.master.parameters(), upper_halves(state.master.values()));
    }
  }
}

// A second moment of 1 under gradients of √2 grows by a thousandth of the way to 2 each step: an eighth of
// bf16's spacing at first. After 500 steps it has gone 39% of the way; to nearest, none of it.
TEST(AdamWRounding, Trap13_SecondMomentDrifts) {
  constexpr int64_t kCount = 512, kSteps = 500;
  const float gradient = std::sqrt(2.0f);
  const State state(kCount, 1);
  const DeviceArray<float> gradients(std::vector<float>(kCount, gradient));
  float nearest = 1;
  for (int64_t step = 1; step <= kSteps; ++step) {
    update(state, gradients, {.step = step}, 0, kCount);
    nearest = rounded(0.999f * nearest + 0.001f * gradient * gradient, DType::kBf16);
  }
  const double expected = 2 - std::pow(0.999, kSteps), tolerance = 0.02;
  EXPECT_NEAR(mean(state.moment2.values()), expected, tolerance);
  EXPECT_GT(std::abs(nearest - expected), 10 * tolerance) << "planted: rounding to nearest must fail";
  EXPECT_EQ(nearest, 1);
}

TEST(AdamWRounding, Trap13_GradientsThatAreHugeOrNotFinite) {
  constexpr int64_t kCount = 1024;
  // v lies between the largest bf16 and the largest fp32.
  const float huge = static_cast<float>(std::sqrt(3.4e38 / 0.001));
  for (const float v : draw(huge, {}, kCount).v) ASSERT_EQ(v, bf16_to_float(0x7f7f));
  // A moment that stays is not rounded again: it is what it was, whatever the random bits.
  for (const float gradient : {std::numeric_limits<float>::infinity(), NAN, 2 * huge}) {
    const State state(kCount, -0.3f);
    const auto master = state.master.values();
    const auto moment1 = state.moment1.read(), moment2 = state.moment2.read();
    update(state, DeviceArray<float>(std::vector<float>(kCount, gradient)), {}, 0, kCount);
    expect_same_bits("master", state.master.values(), master);
    expect_same_bits("moment1", state.moment1.read(), moment1);
    expect_same_bits("moment2", state.moment2.read(), moment2);
  }
}

TEST(AdamWRounding, Repeatable) {
  expect_repeatable("moment2", [] {
    const State state(1500, 0.25f);
    update(state, DeviceArray<float>(normal_values(1500, 6)), {.step = 9}, 0, 1500);
    return state.moment2.read();
  });
}

}  // namespace
}  // namespace minillm::kernels::testing
