#include "kernels/cross_entropy.h"

#include <numeric>

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kScale = 1.0f / 48;

struct Results {
  std::vector<float> loss, gradient;
};

Results run(DType type, int vocabulary, const std::vector<float>& values,
            const std::vector<int32_t>& target_values, float scale_value = kScale, int64_t offset = 0) {
  const Tensor logits(type, values, offset);
  const DeviceArray<float> loss(std::ssize(target_values)), scale(std::vector<float>{scale_value});
  const DeviceArray<int32_t> targets(target_values);
  cross_entropy({.logits = logits.data(),
                 .loss = loss.get(),
                 .targets = targets.get(),
                 .scale = scale.get(),
                 .rows = std::ssize(target_values),
                 .vocabulary = vocabulary,
                 .dtype = type},
                nullptr);
  return {loss.values(), logits.values()};
}

/// Compares one row with float64. What fp32 arithmetic may lose: the exponent x - lse is rounded twice, by
/// 2^-24 |x - lse| each time, a thread and the tree after it add up to 64 terms; a difference with 1 loses
/// 2^-24 of it; a probability near underflow is a multiple of 2^-149.
void expect_row(const Results& results, const std::vector<float>& logits, DType type, int vocabulary,
                int64_t r, int32_t target, double scale = kScale) {
  constexpr double kEpsilon = 0x1p-24, kSmallest = 0x1p-149;
  const float* x = &logits[r * vocabulary];
  const double maximum = *std::max_element(x, x + vocabulary);
  double sum = 0, spread = 0;
  for (int c = 0; c < vocabulary; ++c) sum += std::exp(x[c] - maximum);
  for (int c = 0; c < vocabulary; ++c)
    if (std::isfinite(x[c])) spread += std::exp(x[c] - maximum) / sum * (maximum - x[c]);
  const double lse = maximum + std::log(sum), loss = lse - x[target];
  const double common = 2 * spread + 64;
  EXPECT_NEAR(results.loss[r], loss, (common + 2 * std::abs(maximum - x[target]) + std::log(sum)) * kEpsilon)
      << "loss of row " << r;
  for (int c = 0; c < vocabulary; ++c) {
    const double p = std::exp(x[c] - lse), expected = (p - (c == target)) * scale;
    const double lost = p == 0 ? 0 : p * (2 * std::abs(x[c] - lse) + common) + (c == target);
    const double allowed = scale * (lost * kEpsilon + kSmallest) + 0.501 * ulp(expected, type);
    ASSERT_LE(std::abs(results.gradient[r * vocabulary + c] - expected), allowed)
        << "gradient of row " << r << " column " << c << " of " << vocabulary << ", expected " << expected;
  }
}

void expect_matches_float64(DType type, int vocabulary, float spread, int64_t offset = 0) {
  SCOPED_TRACE(std::string(name_of(type)) + " vocabulary " + std::to_string(vocabulary));
  const std::vector<int32_t> targets = {0, vocabulary - 1, vocabulary / 2, kIgnoreTarget, vocabulary / 3};
  const int64_t rows = std::ssize(targets);
  const std::vector<float> values = rounded(normal_values(rows * vocabulary, 1, spread), type);
  const Results results = run(type, vocabulary, values, targets, kScale, offset);
  for (int64_t r = 0; r < rows; ++r) {
    const auto row = std::span(results.gradient).subspan(r * vocabulary, vocabulary);
    if (targets[r] == kIgnoreTarget) {
      EXPECT_EQ(results.loss[r], 0);
      EXPECT_TRUE(std::ranges::all_of(row, [](float g) { return g == 0; }));
      continue;
    }
    expect_row(results, values, type, vocabulary, r, targets[r]);
    // Each element is off by half a unit of itself at most, and they add up to 2 · scale in absolute value.
    const double sum = std::accumulate(row.begin(), row.end(), 0.0);
    EXPECT_LE(std::abs(sum), 2 * kScale * (type == DType::kFp32 ? 0x1p-18 : 0x1p-8)) << "row " << r;
  }
}

class CrossEntropyType : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, CrossEntropyType, ::testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(CrossEntropyType, MatchesFloat64) {
  for (const int vocabulary : {1, 7, 33, 256, 1024, 1025, 4104})
    for (const float spread : {1.0f, 20.0f}) expect_matches_float64(GetParam(), vocabulary, spread);
}

TEST_P(CrossEntropyType, LargeVocabulary) {
  expect_matches_float64(GetParam(), 32000, 2);
}

TEST_P(CrossEntropyType, MisalignedRows) {
  for (const int vocabulary : {7, 256, 1025}) expect_matches_float64(GetParam(), vocabulary, 3, 1);
}

TEST_P(CrossEntropyType, TargetAtEveryColumn) {
  constexpr int kVocabulary = 264;
  std::vector<int32_t> targets(kVocabulary);
  std::iota(targets.begin(), targets.end(), 0);
  const std::vector<float> values = rounded(normal_values(kVocabulary * kVocabulary, 2), GetParam());
  const Results results = run(GetParam(), kVocabulary, values, targets);
  for (int r = 0; r < kVocabulary; ++r) expect_row(results, values, GetParam(), kVocabulary, r, r);
}

// Adding -scale to a gradient already rounded to bf16 loses all of p - 1 here.
TEST_P(CrossEntropyType, GradientOfANearlyCertainTarget) {
  std::vector<float> values(64, 0.0f);
  values[20] = 11;
  const Results results = run(GetParam(), 64, values, {20});
  expect_row(results, values, GetParam(), 64, 0, 20);
  EXPECT_LT(results.gradient[20], -1e-3f * kScale / 2);
}

// The probability of the target underflows; its loss does not.
TEST_P(CrossEntropyType, LossBeyondTheRangeOfProbabilities) {
  std::vector<float> values(64, -1000.0f);
  values[3] = 1000;
  const Results results = run(GetParam(), 64, values, {40});
  EXPECT_FLOAT_EQ(results.loss[0], rounded(1000, GetParam()) - rounded(-1000, GetParam()));
  EXPECT_EQ(results.gradient[40], rounded(-kScale, GetParam()));
  EXPECT_EQ(results.gradient[3], rounded(kScale, GetParam()));
}

TEST_P(CrossEntropyType, AllRowsIgnored) {
  // Even NaN: what does not count must not reach the gradient.
  const Results results = run(GetParam(), 33, std::vector<float>(3 * 33, NAN), std::vector(3, kIgnoreTarget));
  EXPECT_EQ(results.loss, std::vector<float>(3, 0.0f));
  EXPECT_EQ(results.gradient, std::vector<float>(3 * 33, 0.0f));
}

TEST_P(CrossEntropyType, MinusInfinityHasProbabilityZero) {
  for (const int vocabulary : {33, 1024}) {
    std::vector<float> values = rounded(normal_values(2 * vocabulary, 3), GetParam());
    for (int c = 0; c < vocabulary; ++c)
      if (c != 5 && c != vocabulary - 1) values[c] = -kInfinity;  // most threads see nothing else
    values[vocabulary + 9] = -kInfinity;
    const Results results = run(GetParam(), vocabulary, values, {5, 9});
    expect_row(results, values, GetParam(), vocabulary, 0, 5);
    EXPECT_EQ(results.gradient[0], 0);
    EXPECT_EQ(results.loss[1], kInfinity) << "the target itself is impossible";
    EXPECT_EQ(results.gradient[vocabulary + 9], rounded(-kScale, GetParam()));
  }
}

TEST_P(CrossEntropyType, NanAndUndefinedRowsArePoisonedAndNoOthers) {
  for (const int vocabulary : {33, 1024}) {
    constexpr int kRows = 6;
    std::vector<float> values = rounded(normal_values(kRows * vocabulary, 4), GetParam());
    const auto row_of = [&](int r) { return values.begin() + r * vocabulary; };
    row_of(0)[vocabulary - 2] = NAN;
    row_of(1)[7] = kInfinity;
    std::fill(row_of(2), row_of(3), -kInfinity);
    const std::vector<int32_t> targets = {3, 3, 3, vocabulary, -1, 3};
    const Results results = run(GetParam(), vocabulary, values, targets);
    for (int r = 0; r < 5; ++r) {
      EXPECT_TRUE(std::isnan(results.loss[r])) << r;
      for (int c = 0; c < vocabulary; ++c)
        EXPECT_TRUE(std::isnan(results.gradient[r * vocabulary + c])) << r << " " << c;
    }
    expect_row(results, values, GetParam(), vocabulary, 5, 3);
  }
}

TEST_P(CrossEntropyType, ScaleMayBeZeroOrNegative) {
  const std::vector<float> values = rounded(normal_values(65, 5), GetParam());
  const Results zero = run(GetParam(), 65, values, {1}, 0),
                negative = run(GetParam(), 65, values, {1}, -kScale),
                positive = run(GetParam(), 65, values, {1}, kScale);
  for (int c = 0; c < 65; ++c) {
    EXPECT_EQ(zero.gradient[c], 0);
    EXPECT_EQ(negative.gradient[c], -positive.gradient[c]);
  }
}

TEST_P(CrossEntropyType, Repeatable) {
  const std::vector<float> values = normal_values(4 * 5000, 6);
  expect_repeatable("gradient", [&] { return run(GetParam(), 5000, values, {1, 2, 3, 4999}).gradient; });
  expect_repeatable("loss", [&] { return run(GetParam(), 5000, values, {1, 2, 3, 4999}).loss; });
}

TEST(CrossEntropy, NoRows) {
  EXPECT_NO_THROW(run(DType::kBf16, 33, {}, {}));
}

TEST(CrossEntropy, CountsTargetsThatAreNotIgnored) {
  for (const int64_t rows : {0, 1, 31, 32, 33, 4097, 40'000}) {
    std::vector<int32_t> values(rows);
    float expected = 0;
    for (int64_t r = 0; r < rows; ++r) {
      values[r] = r % 3 == 1 ? kIgnoreTarget : static_cast<int32_t>(r % 50);
      expected += values[r] != kIgnoreTarget;
    }
    const DeviceArray<int32_t> targets(values);
    const DeviceArray<float> count(1), scale(1);
    count_valid_targets(count.get(), targets.get(), rows, nullptr);
    reciprocal_of_count(scale.get(), count.get(), nullptr);
    EXPECT_EQ(count.values()[0], expected);
    EXPECT_EQ(scale.values()[0], 1 / std::max(expected, 1.0f));
  }
}

TEST(CrossEntropy, Cost) {
  EXPECT_EQ(cross_entropy_cost(3, 100, DType::kBf16).bytes, 3 * (100 * 2 * 2 + 8));
  EXPECT_GT(cross_entropy_cost(3, 100, DType::kBf16).flops, 0);
}

}  // namespace
}  // namespace minillm::kernels::testing
