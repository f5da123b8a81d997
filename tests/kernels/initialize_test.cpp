#include "kernels/initialize.h"

#include "core/philox.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

constexpr int64_t kMoments = 200'000;  // values for statistics

Initialize make(Distribution distribution, float a, uint64_t stream = 7) {
  return {.distribution = distribution, .a = a, .seed = 1234, .stream = stream};
}

std::vector<float> run(Initialize args, int64_t first, int64_t count, int64_t offset = 0) {
  const Tensor out(DType::kFp32, count, offset);
  args.out = out.as<float>();
  args.first = first;
  args.count = count;
  initialize(args, nullptr);
  return out.values();
}

/// Mean of (value / scale)^power.
double moment(const std::vector<float>& values, int power, double scale) {
  double total = 0;
  for (const float v : values) total += std::pow(v / scale, power);
  return total / std::ssize(values);
}

TEST(Initialize, AnySplitGivesTheSameBits) {
  constexpr int64_t kCount = 301;
  // Also where indices need more than 32 bits, and counters too.
  for (const int64_t begin : {int64_t{0}, (int64_t{1} << 31) - 150, (int64_t{1} << 34) - 149})
    for (const Distribution d : {Distribution::kConstant, Distribution::kUniform, Distribution::kNormal}) {
      const std::vector<float> whole = run(make(d, 0.5f), begin, kCount);
      for (const int64_t piece : {1, 3, 4, 150, 300}) {
        std::vector<float> joined;
        for (int64_t first = 0; first < kCount; first += piece) {
          const std::vector<float> part =
              run(make(d, 0.5f), begin + first, std::min(piece, kCount - first), first % 2);
          joined.insert(joined.end(), part.begin(), part.end());
        }
        expect_same_bits(std::to_string(piece) + " at a time", joined, whole);
      }
    }
}

TEST(Initialize, UniformIsTheGeneratorsWord) {
  for (const int64_t first : {int64_t{6}, (int64_t{1} << 34) - 50}) {
    const std::vector<float> values = run(make(Distribution::kUniform, 0.25f), first, 100);
    for (int64_t i = 0; i < 100; ++i) {
      const uint32_t word = philox(1234, 7, (i + first) / 4).word[(i + first) % 4];
      EXPECT_EQ(values[i], 0.25f * (2 * uniform_from_bits(word) - 1)) << first + i;
    }
  }
}

TEST(Initialize, UniformHasItsMoments) {
  const std::vector<float> values = run(make(Distribution::kUniform, 0.3f), 0, kMoments);
  const auto [low, high] = std::ranges::minmax(values);
  EXPECT_GE(low, -0.3f);
  EXPECT_LT(high, 0.3f);
  EXPECT_LT(low, -0.2999);
  EXPECT_GT(high, 0.2999);
  // Five standard errors: the variances of u, u² and u⁴ are 1/3, 4/45 and 16/225.
  const double n = std::sqrt(kMoments);
  EXPECT_NEAR(moment(values, 1, 0.3), 0, 5 * std::sqrt(1.0 / 3) / n);
  EXPECT_NEAR(moment(values, 2, 0.3), 1.0 / 3, 5 * std::sqrt(4.0 / 45) / n);
  EXPECT_NEAR(moment(values, 4, 0.3), 1.0 / 5, 5 * std::sqrt(16.0 / 225) / n);
}

TEST(Initialize, NormalHasItsMomentsAndTails) {
  const std::vector<float> values = run(make(Distribution::kNormal, 0.02f), 0, kMoments);
  // Five standard errors: the variances of z, z², z³ and z⁴ are 1, 2, 15 and 96.
  const double n = std::sqrt(kMoments);
  EXPECT_NEAR(moment(values, 1, 0.02), 0, 5 / n);
  EXPECT_NEAR(moment(values, 2, 0.02), 1, 5 * std::sqrt(2.0) / n);
  EXPECT_NEAR(moment(values, 3, 0.02), 0, 5 * std::sqrt(15.0) / n);
  EXPECT_NEAR(moment(values, 4, 0.02), 3, 5 * std::sqrt(96.0) / n);
  const int64_t beyond = std::ranges::count_if(values, [](float v) { return std::abs(v) > 3 * 0.02f; });
  const double expected = 0.0026998 * kMoments;
  EXPECT_NEAR(beyond, expected, 5 * std::sqrt(expected));
}

TEST(Initialize, NeighboursAndStreamsAreIndependent) {
  const std::vector<float> values = run(make(Distribution::kNormal, 1), 0, kMoments);
  const std::vector<float> other = run(make(Distribution::kNormal, 1, 8), 0, kMoments);
  for (const int64_t lag : {1, 2, 3, 4}) {
    double product = 0, square_product = 0;
    for (int64_t i = 0; i + lag < kMoments; ++i) {
      const double x = values[i], y = values[i + lag];
      product += x * y;
      square_product += (x * x - 1) * (y * y - 1);
    }
    EXPECT_NEAR(product / kMoments, 0, 5 / std::sqrt(kMoments)) << "lag " << lag;
    EXPECT_NEAR(square_product / kMoments, 0, 5 * 2 / std::sqrt(kMoments)) << "lag " << lag;
  }
  double between = 0;
  for (int64_t i = 0; i < kMoments; ++i) between += values[i] * other[i];
  EXPECT_NEAR(between / kMoments, 0, 5 / std::sqrt(kMoments));
}

TEST(Initialize, ConstantAndEmpty) {
  for (const float v : run(make(Distribution::kConstant, 0.75f), 3, 1000, 1)) EXPECT_EQ(v, 0.75f);
  EXPECT_TRUE(run(make(Distribution::kNormal, 1), 5, 0).empty());
}

TEST(Initialize, Repeatable) {
  expect_repeatable("initialize", [] { return run(make(Distribution::kNormal, 1), 3, 5000); });
}

}  // namespace
}  // namespace minillm::kernels::testing
