#include "kernels/reduction.h"

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// `before`: what out holds, to be accumulated to; nullptr: poison, to be replaced.
float run(const std::vector<float>& values, bool square, int64_t offset = 0, const float* before = nullptr) {
  const Tensor in(DType::kFp32, values, offset);
  DeviceArray<float> out(1);
  if (before != nullptr) out.set({*before});
  const DeviceBytes scratch(sum_scratch(std::ssize(values)));
  sum({.out = out.get(),
       .in = in.as<float>(),
       .scratch = scratch.as<float>(),
       .count = std::ssize(values),
       .square = square,
       .accumulate = before != nullptr},
      nullptr);
  return out.values()[0];
}

template <class Real>
Real sum_loop(const std::vector<float>& values, bool square, bool absolute = false) {
  Real total = 0;
  for (const Real v : values) total += square ? v * v : absolute ? std::abs(v) : v;
  return total;
}

TEST(Sum, MatchesFloat64) {
  // Around a vector, a round of the block's threads, a range, and several ranges.
  for (const int64_t count : {1, 3, 4, 7, 33, 1023, 1025, 4095, 4096, 4097, 8192, 100003})
    for (const bool square : {false, true}) {
      const std::vector<float> values = normal_values(count, 1);
      const float actual[] = {run(values, square)}, plain[] = {sum_loop<float>(values, square)};
      const double reference[] = {sum_loop<double>(values, square)};
      const double magnitude[] = {sum_loop<double>(values, square, true)};
      expect_close(std::to_string(count) + " values", actual, reference, plain, DType::kFp32, magnitude);
    }
}

TEST(Sum, NothingIsZero) {
  EXPECT_EQ(run({}, false), 0);
  EXPECT_EQ(run({}, true), 0);
}

// One addition of the finished sum: 2^24 and 1.5 is 2^24 + 2, where halves one by one are lost.
TEST(Sum, Accumulates) {
  const float large = 0x1p24f;
  EXPECT_EQ(run({0.5f, 0.5f, 0.5f}, false, 0, &large), large + 2);
  for (const int64_t count : {0, 1, 4097, 100003}) {
    const std::vector<float> values = normal_values(count, 4);
    for (const bool square : {false, true})
      EXPECT_EQ(run(values, square, 0, &large), large + run(values, square)) << count;
  }
}

TEST(Sum, LongerThanAllRangesAtTheirShortest) {
  // 4096 ranges of 4096 elements and some: ranges grow. Ones are summed exactly only if each counts once.
  // Sanitizers see the growing alone in the test of sizes.
  constexpr int64_t kCount = kSanitized ? 12345 : (int64_t{1} << 24) + 12345;
  std::vector<float> values(kCount, 0.0f);
  for (int64_t i = 0; i < kCount; i += 3) values[i] = 1;
  EXPECT_EQ(run(values, false), (kCount + 2) / 3);
}

TEST(Sum, Trap05_AlignmentDoesNotChangeABit) {
  const std::vector<float> values = normal_values(10007, 2);
  const float aligned = run(values, true);
  for (const int64_t offset : {1, 2, 3}) EXPECT_EQ(run(values, true, offset), aligned) << offset;
}

TEST(Sum, NonFiniteValuesPropagate) {
  for (const int64_t at : {0, 4095, 4096, 9999}) {
    std::vector<float> values(10000, 1.0f);
    values[at] = NAN;
    EXPECT_TRUE(std::isnan(run(values, false))) << at;
    EXPECT_TRUE(std::isnan(run(values, true))) << at;
    values[at] = -kInfinity;
    EXPECT_EQ(run(values, false), -kInfinity) << at;
    EXPECT_EQ(run(values, true), kInfinity) << at;
    values[(at + 1) % 10000] = kInfinity;
    EXPECT_TRUE(std::isnan(run(values, false))) << at;
  }
  EXPECT_EQ(run({1e30f, 1e30f}, true), kInfinity);
}

// Thousands of values that a single fp32 running sum loses: 2^24 + 1 is 2^24.
TEST(Sum, Trap14_SmallValuesBesideALargeOne) {
  std::vector<float> values(40'000, 1.0f);
  values[0] = 0x1p24f;
  // Of the thread that adds the large value, its other terms are lost: one in 1024 of the first range.
  EXPECT_NEAR(run(values, false), 0x1p24 + 39'999, 8);
}

TEST(Sum, Repeatable) {
  const std::vector<float> values = normal_values(20000, 3);
  expect_repeatable("sum", [&] { return std::vector<float>{run(values, true)}; });
}

TEST(Sum, Trap01_SizesBeyond32Bits) {
  constexpr int64_t kCount = int64_t{1} << 40;
  EXPECT_EQ(sum_cost(kCount).bytes, 4 * kCount + 4);
  EXPECT_EQ(sum_cost(kCount, true).bytes, 4 * kCount + 8);
  EXPECT_EQ(sum_cost(kCount, true).flops, kCount + 1);
  EXPECT_EQ(sum_scratch(kCount), 4096 * 4);
  EXPECT_LE(sum_scratch(int64_t{4096} * 4100 + 1), 4096 * 4) << "one element must not open another range";
  EXPECT_EQ(sum_cost(kCount).extra_bytes, 2 * 4096 * 4);
}

}  // namespace
}  // namespace minillm::kernels::testing
