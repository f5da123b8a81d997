#include "kernels/rmsnorm.h"

#include "kernels/device/row_offset.h"
#include "tests/kernels/rmsnorm_support.h"

namespace minillm::kernels::testing {
namespace {

// Rows of a warp, of a block's registers, partly in shared memory and partly read twice, each at both sides
// of its limits in vectors of 8 (bf16), 4 (fp32) or 1 (odd or misaligned); more rows than the backward pass
// has blocks.
const std::vector<Shape> kShapes = [] {
  std::vector<Shape> shapes = {{0, 8},    {1, 1},    {7, 7},    {199, 33}, {1, 64},   {7, 72},   {21, 256},
                               {5, 1024}, {7, 1025}, {5, 2048}, {3, 2056}, {7, 4096}, {1, 4104}, {1, 16392}};
  const std::vector<Shape> large = {{2, 8200},  {2, 16384}, {8191, 8},  {8191, 33},
                                    {7, 32776}, {2, 65544}, {1, 152064}};
  if (!kSanitized) shapes.insert(shapes.end(), large.begin(), large.end());
  return shapes;
}();

/// A row longer than registers and, without sanitizers, so long that part of it is read twice.
constexpr int kLong = kSanitized ? 16392 : 152064;

void expect_forward_matches(Shape s, DType type, Misaligned at = {}) {
  const Values v = make_values(s, type);
  const std::string what = name(s, type, at.offset);
  const Forward f(s, v, type, false, at);
  const auto reference = forward_loop<double>(s, v);
  const auto plain = forward_loop<float>(s, v);
  expect_close(what + "y", f.y.values(), reference.y, plain.y, type);
  expect_rounded_once(what + "y", f.y.values(), reference.y, type);
  expect_close(what + "rstd", f.rstd.values(), reference.rstd, plain.rstd, DType::kFp32);
  expect_same_bits(what + "recomputed y", f.y.read(), f.recomputed(s, f.x));
}

/// The sum is the correctly rounded one, and y the norm of the sum as it is stored.
void expect_residual_forward_matches(Shape s, DType type, Misaligned at = {}) {
  Values v = make_values(s, type);
  const std::string what = name(s, type, at.offset) + "with residual ";
  const Forward f(s, v, type, true, at);
  for (size_t i = 0; i < v.x.size(); ++i) v.x[i] = rounded(v.x[i] + v.residual[i], type);
  expect_same_bits(what + "sum", f.sum.values(), v.x);
  const auto reference = forward_loop<double>(s, v);
  const auto plain = forward_loop<float>(s, v);
  expect_close(what + "y", f.y.values(), reference.y, plain.y, type);
  expect_rounded_once(what + "y", f.y.values(), reference.y, type);
  expect_close(what + "rstd", f.rstd.values(), reference.rstd, plain.rstd, DType::kFp32);
  expect_same_bits(what + "recomputed y", f.y.read(), f.recomputed(s, f.sum));
}

void expect_backward_matches(Shape s, DType type, Misaligned at = {}) {
  const bool residual = (s.columns + at.offset) % 2 == 0;
  const Values v = make_values(s, type);
  const std::vector<float> rstd = forward_loop<float>(s, v).rstd;
  const Output output = run_backward(s, v, rstd, type, residual, at);
  const auto reference = backward_loop<double>(s, v, rstd, residual);
  const auto plain = backward_loop<float>(s, v, rstd, residual);
  const std::string what = name(s, type, at.offset);
  expect_close(what + "dx", output.dx, reference.dx, plain.dx, type, reference.dx_magnitude);
  expect_close(what + "dweight", output.dweight, reference.dweight, plain.dweight, DType::kFp32,
               reference.dweight_magnitude);
}

TEST(RmsNorm, Trap11_ForwardMatchesFloat64AndRecomputeMatchesForward) {
  for (const DType type : kAllTypes)
    for (const Shape s : kShapes) expect_forward_matches(s, type);
}
TEST(RmsNorm, Trap11_ResidualForwardMatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const Shape s : kShapes) expect_residual_forward_matches(s, type);
}
TEST(RmsNorm, Trap11_BackwardMatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const Shape s : kShapes) expect_backward_matches(s, type);
}

TEST(RmsNorm, Trap05_MisalignedViews) {
  for (const DType type : kAllTypes)
    for (const Shape s : {Shape{7, 7}, Shape{33, 72}, Shape{7, 1024}, Shape{3, 4096}, Shape{1, 16392}})
      for (const int64_t offset : kSanitized ? std::vector{1} : std::vector{1, 2, 4}) {
        if (kSanitized && s.columns > 2000) continue;
        expect_forward_matches(s, type, {offset});
        expect_residual_forward_matches(s, type, {offset});
        expect_backward_matches(s, type, {offset});
      }
  // One misaligned tensor makes all accesses narrow.
  for (int tensor = 0; tensor < 6; ++tensor)
    for (const int64_t offset : {1, 2}) {
      expect_forward_matches({3, 256}, DType::kBf16, {offset, 1u << tensor});
      expect_residual_forward_matches({3, 256}, DType::kBf16, {offset, 1u << tensor});
      expect_backward_matches({3, 256}, DType::kBf16, {offset, 1u << tensor});
    }
}

TEST(RmsNorm, ResidualIsAddedBeforeRounding) {
  // With the rounded -dx as the residual, what is left of the sum is dx's rounding error: a dx that was
  // rounded first would leave nothing.
  const Shape s = {3, 256};
  Values v = make_values(s, DType::kBf16);
  const std::vector<float> rstd = forward_loop<float>(s, v).rstd;
  const auto without = backward_loop<double>(s, v, rstd, false);
  for (size_t i = 0; i < v.residual.size(); ++i)
    v.residual[i] = rounded(static_cast<float>(-without.dx[i]), DType::kBf16);
  const Output output = run_backward(s, v, rstd, DType::kBf16, true);
  const auto reference = backward_loop<double>(s, v, rstd, true);
  for (size_t i = 0; i < v.residual.size(); ++i)
    EXPECT_NEAR(output.dx[i], reference.dx[i],
                std::abs(reference.dx[i]) / 256 + 1e-6 * reference.dx_magnitude[i])
        << "element " << i;
}

// One addition of the finished sum; dx does not depend on it. Two passes into one buffer are the sum of both.
TEST(RmsNorm, AccumulatesTheWeightGradient) {
  for (const Shape s : {Shape{7, 7}, Shape{300, 72}, Shape{40, 2056}, Shape{17, kSanitized ? 2049 : 16392}})
    for (const DType type : kAllTypes) {
      const Values v = make_values(s, type);
      const std::vector<float> rstd = forward_loop<float>(s, v).rstd,
                               before = normal_values(s.columns, 5, 10);
      const Output fresh = run_backward(s, v, rstd, type, true);
      const Output added = run_backward(s, v, rstd, type, true, {}, 0xFF, before);
      std::vector<float> expected = before, started = before;
      for (int c = 0; c < s.columns; ++c) expected[c] += fresh.dweight[c];
      expect_same_bits(name(s, type, 0) + "dweight", added.dweight, expected);
      expect_same_bits(name(s, type, 0) + "dx", added.dx, fresh.dx);
      for (int64_t i = 0; i < s.rows * s.columns; ++i)
        started[i % s.columns] += v.dy[i] * (v.x[i] * rstd[i / s.columns]);
      EXPECT_NE(started, expected) << "planted: the values of this test cannot tell";
    }
}

// dx in a buffer of its own; run_backward() checks that dy, the residual and all other inputs stay as they
// are.
TEST(RmsNorm, OutOfPlaceLeavesTheInputsAlone) {
  for (const Shape s : {Shape{300, 72}, Shape{9, 2056}, Shape{2, kLong}})
    for (const DType type : kAllTypes)
      for (const bool residual : {false, true}) {
        const Values v = make_values(s, type);
        const std::vector<float> rstd = forward_loop<float>(s, v).rstd;
        const Output output = run_backward(s, v, rstd, type, residual);
        EXPECT_NE(output.dx, residual ? v.residual : v.dy) << "planted: dx there would be seen";
        EXPECT_TRUE(std::ranges::none_of(output.dx, [](float d) { return std::isnan(d); }))
            << "not written whole";
      }
}

TEST(RmsNorm, AliasingGivesTheSameBits) {
  // A row in registers and one that is read twice in part.
  for (const Shape s : {Shape{9, 256}, Shape{1, kLong}})
    for (const DType type : kAllTypes) {
      const Values v = make_values(s, type);
      const std::vector<float> rstd_values = forward_loop<float>(s, v).rstd;
      const Output expected = run_backward(s, v, rstd_values, type, true);
      for (const bool over_dy : {true, false}) {
        const Tensor x(type, v.x), weight(type, v.weight), dy(type, v.dy), residual(type, v.residual);
        const DeviceArray<float> rstd(rstd_values), dweight(s.columns);
        const DeviceBytes scratch(rmsnorm_backward_scratch(s.rows, s.columns));
        const Tensor& dx = over_dy ? dy : residual;
        rmsnorm_backward({.dx = dx.data(),
                          .dweight = dweight.get(),
                          .dy = dy.data(),
                          .x = x.data(),
                          .weight = weight.data(),
                          .rstd = rstd.get(),
                          .residual = residual.data(),
                          .scratch = scratch.as<float>(),
                          .rows = s.rows,
                          .columns = s.columns,
                          .dtype = type},
                         nullptr);
        expect_same_bits("dx", dx.values(), expected.dx);
        expect_same_bits("dweight", dweight.values(), expected.dweight);
      }

      const Forward separate(s, v, type, false), in_place(s, v, type, false);
      rmsnorm_forward({.y = in_place.x.data(),
                       .rstd = in_place.rstd.get(),
                       .x = in_place.x.data(),
                       .weight = in_place.weight.data(),
                       .rows = s.rows,
                       .columns = s.columns,
                       .epsilon = kEpsilon,
                       .dtype = type},
                      nullptr);
      expect_same_bits("y over x", separate.y.read(), in_place.x.read());
      rmsnorm_recompute({.y = separate.x.data(),
                         .rstd = separate.rstd.get(),
                         .x = separate.x.data(),
                         .weight = separate.weight.data(),
                         .rows = s.rows,
                         .columns = s.columns,
                         .dtype = type},
                        nullptr);
      expect_same_bits("recomputed y over x", separate.y.read(), separate.x.read());

      for (const bool sum_over_x : {true, false}) {
        const Forward expected(s, v, type, true), aliased(s, v, type, true);
        RmsNormResidualForward a = aliased.residual_arguments(s);
        a.sum = sum_over_x ? aliased.x.data() : aliased.residual.data();
        a.y = sum_over_x ? aliased.residual.data() : aliased.x.data();
        rmsnorm_residual_forward(a, nullptr);
        expect_same_bits("sum", expected.sum.read(), (sum_over_x ? aliased.x : aliased.residual).read());
        expect_same_bits("y", expected.y.read(), (sum_over_x ? aliased.residual : aliased.x).read());
      }
    }
}

TEST(RmsNorm, NonFiniteValuesStayInTheirRow) {
  for (const Shape s : {Shape{3, 40}, Shape{3, 4096}}) {
    Values v = make_values(s, DType::kBf16);
    v.x[s.columns] = NAN;  // the second row
    const Forward f(s, v, DType::kBf16, false);
    const std::vector<float> y = f.y.values(), rstds = f.rstd.values();
    const Output output = run_backward(s, v, rstds, DType::kBf16, false);
    for (int64_t i = 0; i < s.rows * s.columns; ++i) {
      EXPECT_EQ(std::isnan(y[i]), i / s.columns == 1) << "element " << i;
      EXPECT_EQ(std::isnan(output.dx[i]), i / s.columns == 1) << "element " << i;
    }
    EXPECT_TRUE(std::isnan(rstds[1]));
    EXPECT_TRUE(std::ranges::all_of(output.dweight, [](float g) { return std::isnan(g); }));
  }
}

TEST(RmsNorm, Trap10_DirtyScratch) {
  for (const Shape s : {Shape{40, 256}, Shape{17, 2056}, Shape{17, kSanitized ? 2049 : 16392}}) {
    const Values v = make_values(s, DType::kBf16);
    const std::vector<float> rstd = forward_loop<float>(s, v).rstd;
    const Output nan = run_backward(s, v, rstd, DType::kBf16, false, {}, 0xFF),
                 large = run_backward(s, v, rstd, DType::kBf16, false, {}, 0x7E);
    expect_same_bits("dweight", nan.dweight, large.dweight);
    expect_same_bits("dx", nan.dx, large.dx);
  }
}

// Ones only: bf16 sums of them stop at 256.
TEST(RmsNorm, Trap14_WeightGradientOfManyRowsInFp32) {
  const Shape s = {kSanitized ? 600 : 5000, 8};
  const std::vector<float> ones(s.rows * s.columns, 1.0f);
  const Values v = {ones, std::vector<float>(s.columns, 1.0f), ones, ones};
  const Output output = run_backward(s, v, std::vector<float>(s.rows, 1.0f), DType::kBf16, false);
  EXPECT_EQ(output.dweight, std::vector<float>(s.columns, static_cast<float>(s.rows)));
}

// y = round((x · rstd) · weight): x · rstd is not rounded to bf16 before the product, as some models have it.
TEST(RmsNorm, Trap15_CastOrder) {
  const Shape s = {5, 1000};
  const Values v = make_values(s, DType::kBf16);
  const Forward f(s, v, DType::kBf16, false);
  const std::vector<float> rstd = f.rstd.values();
  std::vector<float> expected, rounded_twice;
  for (int64_t i = 0; i < s.rows * s.columns; ++i) {
    const float normalized = v.x[i] * rstd[i / s.columns], weight = v.weight[i % s.columns];
    expected.push_back(rounded(normalized * weight, DType::kBf16));
    rounded_twice.push_back(rounded(rounded(normalized, DType::kBf16) * weight, DType::kBf16));
  }
  expect_same_bits("y", f.y.values(), expected);
  EXPECT_NE(rounded_twice, expected) << "the values of this test cannot tell";
}

TEST(RmsNorm, Repeatable) {
  for (const Shape s : {Shape{40, 256}, Shape{7, 4096}}) {
    const Values v = make_values(s, DType::kBf16);
    const std::vector<float> rstd = forward_loop<float>(s, v).rstd;
    expect_repeatable("rmsnorm_backward", [&] {
      Output output = run_backward(s, v, rstd, DType::kBf16, true);
      output.dx.insert(output.dx.end(), output.dweight.begin(), output.dweight.end());
      return output.dx;
    });
    expect_repeatable("rmsnorm_residual_forward",
                      [&] { return Forward(s, v, DType::kBf16, true).y.values(); });
  }
}

// The rule of comparison must see a bf16 sum's rounding in the norm, and a row that is left out of dweight.
TEST(RmsNorm, ComparisonFindsPlantedFaults) {
  const Shape s = {64, 256};
  const Values v = make_values(s, DType::kBf16);
  Values not_rounded = v;
  for (size_t i = 0; i < v.x.size(); ++i) not_rounded.x[i] += v.residual[i];
  const auto reference = forward_loop<double>(s, not_rounded);
  const Forward f(s, v, DType::kBf16, true);
  const std::vector<float> y = f.y.values();
  int64_t different = 0;
  for (size_t i = 0; i < reference.y.size(); ++i)
    different += y[i] != rounded(static_cast<float>(reference.y[i]), DType::kBf16);
  EXPECT_GT(different, std::ssize(reference.y) / 10) << "the norm of the exact sum looks the same";

  const std::vector<float> rstd = forward_loop<float>(s, v).rstd;
  Output output = run_backward(s, v, rstd, DType::kBf16, false);
  const auto exact = backward_loop<double>(s, v, rstd, false);
  const auto error = [&] {
    return largest_error(output.dweight, exact.dweight, DType::kFp32, exact.dweight_magnitude).units;
  };
  EXPECT_LT(error(), 10);
  for (int c = 0; c < s.columns; ++c) output.dweight[c] -= v.dy[c] * v.x[c] * rstd[0];
  EXPECT_GT(error(), 1000);
}

TEST(RmsNorm, Trap01_SizesBeyond32Bits) {
  constexpr int64_t kRows = int64_t{1} << 24;
  constexpr int kColumns = 4096;
  static_assert(row_offset(kRows, kColumns) == int64_t{1} << 36);
  EXPECT_EQ(rmsnorm_forward_cost(kRows, kColumns, DType::kBf16).flops, 4 * kRows * kColumns);
  EXPECT_EQ(rmsnorm_backward_cost(kRows, kColumns, true, DType::kBf16).bytes,
            4 * kRows * kColumns * 2 + kColumns * 2 + 4 * (kRows + kColumns));
  EXPECT_EQ(rmsnorm_backward_scratch(kRows, kColumns), rmsnorm_backward_scratch(2 * kRows, kColumns))
      << "scratch must not grow with the rows";
}

TEST(RmsNorm, Cost) {
  EXPECT_EQ(rmsnorm_recompute_cost(3, 100, DType::kBf16).bytes, 7 * 100 * 2 + 3 * 4);
  EXPECT_EQ(rmsnorm_residual_forward_cost(3, 100, DType::kBf16).bytes, 13 * 100 * 2 + 3 * 4);
  for (const int columns : {1, 4096, 65536, 114688})
    EXPECT_EQ(rmsnorm_forward_cost(3, columns, DType::kBf16).extra_bytes, 0) << columns;
  EXPECT_GT(rmsnorm_forward_cost(3, 152064, DType::kBf16).extra_bytes, 0);
  for (const int columns : {4096, 32768}) {
    const Cost replacing = rmsnorm_backward_cost(5, columns, false, DType::kBf16),
               accumulating = rmsnorm_backward_cost(5, columns, false, DType::kBf16, true);
    EXPECT_EQ(accumulating.bytes - replacing.bytes, 4 * columns);
    EXPECT_EQ(accumulating.flops - replacing.flops, columns);
    EXPECT_EQ(accumulating.extra_bytes, replacing.extra_bytes);
  }
  for (const int64_t rows : {16, 2048, 65536}) {
    const Cost cost = rmsnorm_backward_cost(rows, 4096, false, DType::kBf16);
    EXPECT_EQ(cost.extra_bytes, 2 * rmsnorm_backward_scratch(rows, 4096));
    EXPECT_LT(static_cast<double>(cost.extra_bytes), 0.1 * static_cast<double>(cost.bytes)) << rows;
  }
}

}  // namespace
}  // namespace minillm::kernels::testing
