#include "kernels/cross_entropy.h"

#include <numeric>

#include "core/error.h"
#include "kernels/device/row_offset.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kScale = 1.0f / 48;

struct Results {
  std::vector<float> loss, gradient;
};

struct Options {
  float scale = kScale;
  int64_t offset = 0;  ///< elements by which the logits are misaligned
  int columns = 0;
};

Results run(DType type, int vocabulary, const std::vector<float>& values,
            const std::vector<int32_t>& target_values, const Options& o = {}) {
  const Tensor logits(type, values, o.offset);
  const DeviceArray<float> loss(std::ssize(target_values)), scale(std::vector<float>{o.scale});
  const DeviceArray<int32_t> targets(target_values);
  cross_entropy({.logits = logits.data(),
                 .loss = loss.get(),
                 .targets = targets.get(),
                 .scale = scale.get(),
                 .rows = std::ssize(target_values),
                 .vocabulary = vocabulary,
                 .columns = o.columns,
                 .dtype = type},
                nullptr);
  return {loss.values(), logits.values()};
}

/// The worst error of a row in units of what fp32 arithmetic may lose: the exponent x - lse is rounded twice,
/// by 2^-24 |x - lse| each time, a thread and the tree after it add up to 64 terms; a difference with 1 loses
/// 2^-24 of it; a probability below 2^-126 of the largest is 0.
struct RowError {
  double loss = 0, gradient = 0;
  int column = 0;  ///< of the gradient's
};
RowError row_error(float result_loss, std::span<const float> gradient, std::span<const float> x, DType type,
                   int32_t target, double scale = kScale) {
  constexpr double kEpsilon = 0x1p-24, kSmallest = 0x1p-126;
  const double maximum = *std::ranges::max_element(x);
  double sum = 0, spread = 0;
  for (const float logit : x) sum += std::exp(logit - maximum);
  for (const float logit : x)
    if (std::isfinite(logit)) spread += std::exp(logit - maximum) / sum * (maximum - logit);
  const double lse = maximum + std::log(sum), common = 2 * spread + 64;
  RowError worst;
  worst.loss = std::abs(result_loss - (lse - x[target])) /
               ((common + 2 * std::abs(maximum - x[target]) + std::log(sum)) * kEpsilon);
  for (int c = 0; c < std::ssize(x); ++c) {
    const double p = std::exp(x[c] - lse), expected = (p - (c == target)) * scale;
    const double lost = p == 0 ? 0 : p * (2 * std::abs(x[c] - lse) + common) + (c == target);
    const double allowed = scale * (lost * kEpsilon + kSmallest) + 0.501 * ulp(expected, type);
    const double error = std::abs(gradient[c] - expected) / allowed;
    if (!(error <= worst.gradient)) {  // NaN is an error
      worst.gradient = std::isnan(error) ? kInfinity : error;
      worst.column = c;
    }
  }
  return worst;
}

/// Row r of results and logits whose rows are `columns` long.
void expect_row(const Results& results, const std::vector<float>& logits, DType type, int vocabulary,
                int64_t r, int32_t target, int columns = 0) {
  const int64_t start = r * (columns == 0 ? vocabulary : columns);
  const std::span<const float> gradient(&results.gradient[start], vocabulary);
  const RowError error =
      row_error(results.loss[r], gradient, std::span(&logits[start], vocabulary), type, target);
  EXPECT_LE(error.loss, 1) << "loss of row " << r << " is " << results.loss[r];
  EXPECT_LE(error.gradient, 1) << "gradient of row " << r << " column " << error.column << " of "
                               << vocabulary << " is " << gradient[error.column];
}

void expect_matches_float64(DType type, int vocabulary, float spread, const Options& o = {}) {
  SCOPED_TRACE(std::string(name_of(type)) + " vocabulary " + std::to_string(vocabulary) + " offset " +
               std::to_string(o.offset));
  const std::vector<int32_t> targets = {0, vocabulary - 1, vocabulary / 2, kIgnoreTarget, vocabulary / 3};
  const int64_t rows = std::ssize(targets);
  const std::vector<float> values = rounded(normal_values(rows * vocabulary, 1, spread), type);
  const Results results = run(type, vocabulary, values, targets, o);
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
  for (const int vocabulary : {1, 7, 33, 256, 1025, 2048, 2056, 4104})
    for (const float spread : {1.0f, 20.0f}) expect_matches_float64(GetParam(), vocabulary, spread);
}

// In registers; partly in shared memory; and so long that part of the row is read twice.
TEST_P(CrossEntropyType, LargeVocabulary) {
  for (const int vocabulary : {32000, 50304, 152064})
    if (!kSanitized || vocabulary == 152064) expect_matches_float64(GetParam(), vocabulary, 2);
}

TEST_P(CrossEntropyType, Trap05_RowsOfAnyAlignment) {
  for (const int64_t offset : {1, 2, 7})
    for (const int vocabulary : {1, 7, 8, 15, 256, 1025})
      expect_matches_float64(GetParam(), vocabulary, 3, {.offset = offset});
  expect_matches_float64(GetParam(), 50257, 2);
  if (!kSanitized) expect_matches_float64(GetParam(), 152064, 2, {.offset = 3});
}

TEST_P(CrossEntropyType, Trap11_AnyNumberOfRows) {
  for (const int64_t rows : {1, 199, kSanitized ? 499 : 8191})
    for (const int vocabulary : {7, 33}) {
      const std::vector<float> values = rounded(normal_values(rows * vocabulary, 8), GetParam());
      std::vector<int32_t> targets(rows);
      for (int64_t r = 0; r < rows; ++r) targets[r] = static_cast<int32_t>(r % vocabulary);
      const Results results = run(GetParam(), vocabulary, values, targets);
      for (int64_t r = 0; r < rows; ++r) expect_row(results, values, GetParam(), vocabulary, r, targets[r]);
    }
}

TEST_P(CrossEntropyType, TargetAtEveryColumn) {
  for (const int vocabulary : {33, 264}) {  // odd rows: each has another alignment
    std::vector<int32_t> targets(vocabulary);
    std::iota(targets.begin(), targets.end(), 0);
    const std::vector<float> values = rounded(normal_values(vocabulary * vocabulary, 2), GetParam());
    const Results results = run(GetParam(), vocabulary, values, targets);
    for (int r = 0; r < vocabulary; ++r) expect_row(results, values, GetParam(), vocabulary, r, r);
  }
}

// All rows are the same but for the target: a target lost at a boundary between threads, slots or kinds of
// memory, or read after it was overwritten, changes its row's loss or more than its element.
TEST_P(CrossEntropyType, Trap12_TargetAtEverySliceBoundary) {
  const int width = 16 / static_cast<int>(size_of(GetParam()));
  for (const auto& [vocabulary, threads] : {std::pair(50304, 512), std::pair(152064, 1024)}) {
    std::vector<int32_t> targets = {0};
    for (int c = threads * width; c < vocabulary; c += threads * width * (kSanitized ? 7 : 1))
      targets.insert(targets.end(), {c - 1, c});
    const std::vector<float> row = rounded(normal_values(vocabulary, 9), GetParam());
    std::vector<float> values;
    for (size_t r = 0; r < targets.size(); ++r) values.insert(values.end(), row.begin(), row.end());
    const Results results = run(GetParam(), vocabulary, values, targets);
    expect_row(results, values, GetParam(), vocabulary, 0, 0);
    for (size_t r = 1; r < targets.size(); ++r) {
      const float* const gradient = &results.gradient[r * vocabulary];
      EXPECT_NEAR(results.loss[r] - results.loss[0], row[0] - row[targets[r]], 1e-5f) << targets[r];
      EXPECT_LT(gradient[targets[r]], -kScale / 2) << targets[r];
      for (int c = 1; c < vocabulary; ++c)
        ASSERT_EQ(gradient[c] == results.gradient[c], c != targets[r]) << targets[r] << " " << c;
    }
  }
}

// What lies in padded columns must not matter, whatever their number does to the alignment of rows.
TEST_P(CrossEntropyType, Trap08_PaddedColumns) {
  for (const auto& [vocabulary, columns] : {std::pair(1, 8), std::pair(33, 64), std::pair(100, 101),
                                            std::pair(1025, 1152), std::pair(50257, 50304)})
    for (const float padding : {NAN, kInfinity, 1e4f}) {
      const std::vector<int32_t> targets = {0, vocabulary - 1, kIgnoreTarget, vocabulary, vocabulary / 2};
      std::vector<float> values = rounded(normal_values(std::ssize(targets) * columns, 3), GetParam());
      for (size_t i = 0; i < values.size(); ++i)
        if (static_cast<int>(i % columns) >= vocabulary) values[i] = padding;
      const Results results = run(GetParam(), vocabulary, values, targets, {.columns = columns});
      for (const int r : {0, 1, 4})
        expect_row(results, values, GetParam(), vocabulary, r, targets[r], columns);
      EXPECT_EQ(results.loss[2], 0);
      EXPECT_TRUE(std::isnan(results.loss[3])) << "a padded column is no target";
      for (size_t i = 0; i < values.size(); ++i) {
        if (static_cast<int>(i % columns) < vocabulary) continue;
        ASSERT_EQ(results.gradient[i], 0) << "column " << i % columns << " of " << columns;
      }
      EXPECT_TRUE(std::isnan(results.gradient[3 * columns]));
    }
  EXPECT_THROW(run(GetParam(), 33, std::vector<float>(32), {0}, {.columns = 32}), UsageError);
}

// Adding -scale to a gradient already rounded to bf16 loses all of p - 1 here.
TEST_P(CrossEntropyType, Trap23_GradientOfANearlyCertainTarget) {
  std::vector<float> values(64, 0.0f);
  values[20] = 11;
  const Results results = run(GetParam(), 64, values, {20});
  expect_row(results, values, GetParam(), 64, 0, 20);
  EXPECT_LT(results.gradient[20], -1e-3f * kScale / 2);
}

// The probability of the target underflows; its loss does not.
TEST_P(CrossEntropyType, Trap12_LossBeyondTheRangeOfProbabilities) {
  std::vector<float> values(64, -1000.0f);
  values[3] = 1000;
  const Results results = run(GetParam(), 64, values, {40});
  EXPECT_FLOAT_EQ(results.loss[0], rounded(1000, GetParam()) - rounded(-1000, GetParam()));
  EXPECT_EQ(results.gradient[40], rounded(-kScale, GetParam()));
  EXPECT_EQ(results.gradient[3], rounded(kScale, GetParam()));
}

TEST_P(CrossEntropyType, LogitsOfAnyFiniteSize) {
  for (const float size : {1e4f, 1e12f, 3e38f}) {
    std::vector<float> values(33, -size);
    values[5] = values[32] = size;
    const Results results = run(GetParam(), 33, values, {5});
    EXPECT_FLOAT_EQ(results.loss[0], std::log(2.0f)) << size;
    EXPECT_EQ(results.gradient[5], rounded(-kScale / 2, GetParam())) << size;
    EXPECT_EQ(results.gradient[32], rounded(kScale / 2, GetParam())) << size;
  }
}

TEST_P(CrossEntropyType, Trap07_AllRowsIgnored) {
  // Even NaN: what does not count must not reach the gradient.
  for (const int64_t offset : {0, 1}) {
    const Results results = run(GetParam(), 33, std::vector<float>(3 * 33, NAN),
                                std::vector(3, kIgnoreTarget), {.offset = offset});
    EXPECT_EQ(results.loss, std::vector<float>(3, 0.0f));
    EXPECT_EQ(results.gradient, std::vector<float>(3 * 33, 0.0f));
  }
}

TEST_P(CrossEntropyType, Trap07_MinusInfinityHasProbabilityZero) {
  for (const int vocabulary : {33, 1024, 50257}) {
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

TEST_P(CrossEntropyType, Trap07_NanAndUndefinedRowsArePoisonedAndNoOthers) {
  for (const int vocabulary : {33, 1024, 50257}) {
    constexpr int kRows = 8;
    std::vector<float> values = rounded(normal_values(kRows * vocabulary, 4), GetParam());
    const auto row_of = [&](int r) { return values.begin() + r * vocabulary; };
    row_of(0)[vocabulary - 2] = NAN;
    row_of(1)[7] = kInfinity;
    std::fill(row_of(2), row_of(3), -kInfinity);
    std::fill(row_of(5), row_of(6), NAN);
    row_of(6)[0] = NAN;  // outside vectors where rows are misaligned
    const std::vector<int32_t> targets = {3, 3, 3, vocabulary, -1, 3, 3, 3};
    const Results results = run(GetParam(), vocabulary, values, targets, {.offset = 1});
    for (int r = 0; r < kRows - 1; ++r) {
      EXPECT_TRUE(std::isnan(results.loss[r])) << r;
      for (int c = 0; c < vocabulary; ++c)
        ASSERT_TRUE(std::isnan(results.gradient[r * vocabulary + c])) << r << " " << c;
    }
    expect_row(results, values, GetParam(), vocabulary, kRows - 1, 3);
  }
}

TEST_P(CrossEntropyType, Trap22_ScaleMayBeZeroOrNegative) {
  const std::vector<float> values = rounded(normal_values(65, 5), GetParam());
  const Results zero = run(GetParam(), 65, values, {1}, {.scale = 0}),
                negative = run(GetParam(), 65, values, {1}, {.scale = -kScale}),
                positive = run(GetParam(), 65, values, {1}, {.scale = kScale});
  for (int c = 0; c < 65; ++c) {
    EXPECT_EQ(zero.gradient[c], 0);
    EXPECT_EQ(negative.gradient[c], -positive.gradient[c]);
  }
}

TEST_P(CrossEntropyType, Repeatable) {
  for (const int vocabulary : {17, 5001}) {  // targets before, in and after the whole vectors of their rows
    const std::vector<int32_t> targets = {0, vocabulary / 2, vocabulary - 1, 1};
    const std::vector<float> values = normal_values(4 * vocabulary, 6);
    expect_repeatable("loss and gradient", [&] {
      Results results = run(GetParam(), vocabulary, values, targets, {.offset = 1});
      results.gradient.insert(results.gradient.end(), results.loss.begin(), results.loss.end());
      return results.gradient;
    });
  }
}

// The faults that the comparison is there for: a target's gradient from a rounded probability, one logit too
// many or too few in the sum, a target's neighbour taken for it, a NaN.
TEST(CrossEntropy, ComparisonFindsPlantedFaults) {
  constexpr int kVocabulary = 1024;
  std::vector<float> x = rounded(normal_values(kVocabulary, 7), DType::kBf16);
  x[20] = 14;
  const Results good = run(DType::kBf16, kVocabulary, x, {20});
  const auto error = [&](float loss, const std::vector<float>& gradient) {
    return row_error(loss, gradient, x, DType::kBf16, 20);
  };
  EXPECT_LE(error(good.loss[0], good.gradient).loss, 1);
  EXPECT_LE(error(good.loss[0], good.gradient).gradient, 1);
  std::vector<float> gradient = good.gradient;
  gradient[20] = rounded(rounded(std::exp(-good.loss[0]) * kScale, DType::kBf16) - kScale, DType::kBf16);
  EXPECT_GT(error(good.loss[0], gradient).gradient, 1);
  gradient = good.gradient;
  std::swap(gradient[20], gradient[21]);
  EXPECT_GT(error(good.loss[0], gradient).gradient, 1);
  gradient[20] = NAN;
  EXPECT_EQ(error(good.loss[0], gradient).gradient, kInfinity);

  x[20] = 0;
  const Results flat = run(DType::kBf16, kVocabulary, x, {20});
  EXPECT_LE(error(flat.loss[0], flat.gradient).loss, 1);
  const float sum = std::exp(flat.loss[0]);  // in units of the target's term
  EXPECT_GT(error(std::log(sum + 1), flat.gradient).loss, 1);
  EXPECT_GT(error(std::log(sum - 1), flat.gradient).loss, 1);
}

TEST(CrossEntropy, NoRows) {
  EXPECT_NO_THROW(run(DType::kBf16, 33, {}, {}));
}

TEST(CrossEntropy, Trap01_RowOffsetsBeyond32Bits) {
  static_assert(row_offset(int64_t{1} << 20, 152064) == 159'450'660'864);
  EXPECT_EQ(row_offset(16'384, 152'064), 2'491'416'576) << "beyond 2^31";
  constexpr int64_t kRows = int64_t{1} << 20;
  EXPECT_EQ(cross_entropy_cost(kRows, 128256, DType::kBf16).bytes, kRows * (128256 * 4 + 8));
}

TEST(CrossEntropy, Trap07_CountsTargetsThatAreNotIgnored) {
  for (const int64_t rows : {0, 1, 31, 32, 33, 1025, 4097, 40'000}) {
    std::vector<int32_t> values(rows);
    float expected = 0;
    for (int64_t r = 0; r < rows; ++r) {
      values[r] = r % 3 != 1 ? kIgnoreTarget : static_cast<int32_t>(r % 50);
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
  EXPECT_EQ(cross_entropy_cost(3, 100, DType::kBf16, 128).bytes, 3 * ((100 + 128) * 2 + 8));
  EXPECT_GT(cross_entropy_cost(3, 100, DType::kBf16).flops, 0);
  for (const int vocabulary : {1, 32000, 50304, 65536, 114688})
    EXPECT_EQ(cross_entropy_cost(1, vocabulary, DType::kBf16).extra_bytes, 0) << vocabulary;
  EXPECT_EQ(cross_entropy_cost(1, 128256, DType::kBf16).extra_bytes, 2 * 1024 * 16);
}

}  // namespace
}  // namespace minillm::kernels::testing
