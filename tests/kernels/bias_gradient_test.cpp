#include "kernels/bias_gradient.h"

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

struct Shape {
  int64_t rows;
  int columns;
};

constexpr int64_t kTall = kSanitized ? 3000 : 300'000;  // more ranges than there may be

// Rows of threads from one warp's width down to one thread; less and more than a tile in vectors, words and
// elements; one range of rows, several, as many as there may be.
constexpr Shape kShapes[] = {{0, 8},     {1, 1},     {7, 7},      {199, 33},  {1, 64},
                             {128, 256}, {129, 264}, {199, 1025}, {7, 4096},  {1000, 40},
                             {8191, 24}, {8191, 7},  {1100, 68},  {700, 258}, {kTall, 3}};

template <class Real>
std::vector<Real> column_sums(Shape s, const std::vector<float>& dy, bool absolute = false) {
  std::vector<Real> result(s.columns);
  for (int64_t r = 0; r < s.rows; ++r)
    for (int c = 0; c < s.columns; ++c) {
      const Real value = dy[r * s.columns + c];
      result[c] += absolute ? std::abs(value) : value;
    }
  return result;
}

/// `before`: what dbias holds, to be accumulated to; empty: poison, to be replaced.
std::vector<float> run(Shape s, const Tensor& dy, const std::vector<float>& before = {}) {
  DeviceArray<float> dbias(s.columns);
  if (!before.empty()) dbias.set(before);
  const DeviceBytes scratch(bias_gradient_scratch(s.rows, s.columns));
  bias_gradient({.dbias = dbias.get(),
                 .dy = dy.data(),
                 .scratch = scratch.as<float>(),
                 .rows = s.rows,
                 .columns = s.columns,
                 .dtype = dy.type(),
                 .accumulate = !before.empty()},
                nullptr);
  return dbias.values();
}

TEST(BiasGradient, MatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const Shape s : kShapes)
      for (const int64_t offset : {0, 1, 2}) {
        const std::vector<float> values = rounded(normal_values(s.rows * s.columns, 1), type);
        expect_close(std::to_string(s.rows) + " x " + std::to_string(s.columns),
                     run(s, Tensor(type, values, offset)), column_sums<double>(s, values),
                     column_sums<float>(s, values), DType::kFp32, column_sums<double>(s, values, true));
      }
}

// One addition of the finished sum. A sum that starts from what the buffer holds has other bits.
TEST(BiasGradient, Accumulates) {
  for (const Shape s : kShapes) {
    const std::vector<float> values = normal_values(s.rows * s.columns, 3),
                             before = normal_values(s.columns, 4, 10);
    const Tensor dy(DType::kFp32, values);
    std::vector<float> expected = run(s, dy), started = before;
    for (int c = 0; c < s.columns; ++c) expected[c] = before[c] + expected[c];
    expect_same_bits(std::to_string(s.rows) + " x " + std::to_string(s.columns), run(s, dy, before),
                     expected);
    for (size_t i = 0; i < values.size(); ++i) started[i % s.columns] += values[i];
    if (s.rows > 100) {
      EXPECT_NE(started, expected) << "planted: the values of this test cannot tell";
    }
  }
}

TEST(BiasGradient, Trap14_SumsThatBf16CannotHold) {
  // In bf16 256 + 1 is 256.
  const Shape s = {5000, 16};
  for (const float sum : run(s, Tensor(DType::kBf16, std::vector<float>(s.rows * s.columns, 1.0f))))
    EXPECT_EQ(sum, 5000);
}

TEST(BiasGradient, NonFiniteValuesStayInTheirColumn) {
  const Shape s = {300, 40};
  std::vector<float> values(s.rows * s.columns, 1.0f);
  values[299 * s.columns + 3] = NAN;
  values[17 * s.columns + 5] = std::numeric_limits<float>::infinity();
  const std::vector<float> result = run(s, Tensor(DType::kBf16, values));
  for (int c = 0; c < s.columns; ++c) EXPECT_EQ(std::isfinite(result[c]), c != 3 && c != 5) << c;
  EXPECT_TRUE(std::isnan(result[3]));
  EXPECT_TRUE(std::isinf(result[5]));
}

TEST(BiasGradient, Repeatable) {
  const Shape s = {1000, 264};
  const Tensor dy(DType::kBf16, normal_values(s.rows * s.columns, 2));
  expect_repeatable("bias_gradient", [&] { return run(s, dy); });
}

// The widths that alignment leaves: 16 bytes, words, elements. Integers are added exactly in any order.
TEST(BiasGradient, Trap05_MisalignedViews) {
  for (const DType type : kAllTypes)
    for (const int columns : {33, 34, 40}) {
      const Shape s = {300, columns};
      std::vector<float> values(s.rows * s.columns);
      for (int64_t i = 0; i < std::ssize(values); ++i) values[i] = static_cast<float>(i % 61);
      const std::vector<float> aligned = run(s, Tensor(type, values));
      for (const int64_t offset : {1, 2, 3, 4})
        expect_same_bits("dbias", aligned, run(s, Tensor(type, values, offset)));
      EXPECT_EQ(aligned[columns - 1], column_sums<double>(s, values)[columns - 1]);
    }
}

// One column of one row misplaced by a row is the fault: every element has a value of its own.
TEST(BiasGradient, Trap11_LastRowsOfARange) {
  for (const int64_t rows : {1, 127, 128, 129, 199, 255, 257, 1023, 1025}) {
    const Shape s = {rows, 8};
    std::vector<float> values(s.rows * s.columns);
    for (int64_t i = 0; i < std::ssize(values); ++i) values[i] = static_cast<float>(i % 64);
    const std::vector<double> expected = column_sums<double>(s, values);
    const std::vector<float> result = run(s, Tensor(DType::kBf16, values));
    for (int c = 0; c < s.columns; ++c) EXPECT_EQ(result[c], expected[c]) << rows << " rows, column " << c;
  }
}

TEST(BiasGradient, Trap01_SizesBeyond32Bits) {
  constexpr int64_t kRows = int64_t{1} << 24;
  EXPECT_EQ(bias_gradient_cost(kRows, 4096, DType::kBf16).bytes, kRows * 4096 * 2 + 4096 * 4);
  EXPECT_EQ(bias_gradient_scratch(kRows, 4096), bias_gradient_scratch(2 * kRows, 4096))
      << "scratch must not grow with the rows";
  EXPECT_EQ(bias_gradient_cost(kRows, 4096, DType::kBf16).extra_bytes,
            2 * bias_gradient_scratch(kRows, 4096));
  const Cost accumulated = bias_gradient_cost(kRows, 4096, DType::kBf16, true);
  EXPECT_EQ(accumulated.bytes, kRows * 4096 * 2 + 2 * 4096 * 4);
  EXPECT_EQ(accumulated.flops, (kRows + 1) * 4096);
  const Cost tall = bias_gradient_cost(8192, 6144, DType::kBf16);
  EXPECT_LT(tall.extra_bytes, tall.bytes / 20) << "partial sums must be small beside dy";
}

}  // namespace
}  // namespace minillm::kernels::testing
