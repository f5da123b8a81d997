#include "kernels/rmsnorm.h"

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

struct Shape {
  int64_t rows;
  int columns;
};

// Rows shared by a warp, by a block, and too long for registers, each at both sides of its limit in vectors
// of 8 (bf16), 4 (fp32) or 1 (odd or misaligned); more rows than the backward pass has blocks.
constexpr Shape kShapes[] = {{0, 8},    {1, 1},     {7, 7},     {199, 33}, {1, 64},   {7, 72},
                             {21, 256}, {5, 1024},  {7, 1025},  {5, 2048}, {3, 2056}, {7, 4096},
                             {2, 8200}, {2, 16384}, {2, 16392}, {1100, 24}};
constexpr float kEpsilon = 1e-5f;

/// Tensors of one problem, rounded to the type.
struct Values {
  std::vector<float> x, weight, dy, residual;
};
Values make_values(Shape s, DType type) {
  return {rounded(normal_values(s.rows * s.columns, 1, 2), type), rounded(normal_values(s.columns, 2), type),
          rounded(normal_values(s.rows * s.columns, 3), type),
          rounded(normal_values(s.rows * s.columns, 4), type)};
}

template <class Real>
struct ForwardResult {
  std::vector<Real> y, rstd;
};
template <class Real>
ForwardResult<Real> forward_loop(Shape s, const Values& v) {
  ForwardResult<Real> result;
  for (int64_t r = 0; r < s.rows; ++r) {
    const float* const x = &v.x[r * s.columns];
    Real squares = 0;
    for (int c = 0; c < s.columns; ++c) squares += Real(x[c]) * Real(x[c]);
    result.rstd.push_back(1 / std::sqrt(squares / s.columns + Real(kEpsilon)));
    for (int c = 0; c < s.columns; ++c) result.y.push_back(x[c] * result.rstd.back() * v.weight[c]);
  }
  return result;
}

template <class Real>
struct BackwardResult {
  std::vector<Real> dx, dweight;
  std::vector<double> dx_magnitude, dweight_magnitude;  // sums of the absolute values of the terms
};
template <class Real>
BackwardResult<Real> backward_loop(Shape s, const Values& v, const std::vector<float>& rstds, bool residual) {
  BackwardResult<Real> result;
  result.dweight.resize(s.columns);
  result.dweight_magnitude.resize(s.columns);
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t base = r * s.columns;
    const Real rstd = rstds[r];
    Real dot = 0, dot_magnitude = 0;
    for (int c = 0; c < s.columns; ++c) {
      const Real product = v.dy[base + c] * (v.x[base + c] * rstd);
      result.dweight[c] += product;
      result.dweight_magnitude[c] += std::abs(product);
      dot += product * v.weight[c];
      dot_magnitude += std::abs(product * v.weight[c]);
    }
    for (int c = 0; c < s.columns; ++c) {
      const Real normalized = v.x[base + c] * rstd, g = Real(v.dy[base + c]) * v.weight[c];
      const Real added = residual ? v.residual[base + c] : 0;
      result.dx.push_back((g - normalized * (dot / s.columns)) * rstd + added);
      result.dx_magnitude.push_back((std::abs(g) + std::abs(normalized) * dot_magnitude / s.columns) * rstd +
                                    std::abs(added));
    }
  }
  return result;
}

struct Output {
  std::vector<float> dx, dweight;
};
/// Runs the backward pass with dx in a tensor of its own.
Output run_backward(Shape s, const Values& v, const std::vector<float>& rstds, DType type, bool residual,
                    int64_t offset) {
  const Tensor x(type, v.x, offset), weight(type, v.weight), dy(type, v.dy), res(type, v.residual);
  const Tensor dx(type, s.rows * s.columns, offset);
  const DeviceArray<float> rstd(rstds), dweight(s.columns);
  const DeviceBytes scratch(rmsnorm_backward_scratch(s.rows, s.columns));
  rmsnorm_backward({.dx = dx.data(),
                    .dweight = dweight.get(),
                    .dy = dy.data(),
                    .x = x.data(),
                    .weight = weight.data(),
                    .rstd = rstd.get(),
                    .residual = residual ? res.data() : nullptr,
                    .scratch = scratch.as<float>(),
                    .rows = s.rows,
                    .columns = s.columns,
                    .dtype = type},
                   nullptr);
  return {dx.values(), dweight.values()};
}

std::string name(Shape s, DType type, int64_t offset) {
  return std::to_string(s.rows) + " x " + std::to_string(s.columns) + " " + std::string(name_of(type)) +
         (offset != 0 ? " misaligned " : " ");
}

TEST(RmsNorm, ForwardMatchesFloat64AndRecomputeMatchesForward) {
  for (const DType type : kAllTypes)
    for (const Shape s : kShapes)
      for (const int64_t offset : {0, 1}) {
        const Values v = make_values(s, type);
        const Tensor x(type, v.x, offset), weight(type, v.weight), y(type, s.rows * s.columns);
        const DeviceArray<float> rstd(s.rows);
        rmsnorm_forward({.y = y.data(),
                         .rstd = rstd.get(),
                         .x = x.data(),
                         .weight = weight.data(),
                         .rows = s.rows,
                         .columns = s.columns,
                         .epsilon = kEpsilon,
                         .dtype = type},
                        nullptr);
        const auto reference = forward_loop<double>(s, v);
        const auto plain = forward_loop<float>(s, v);
        expect_close(name(s, type, offset) + "y", y.values(), reference.y, plain.y, type);
        expect_rounded_once(name(s, type, offset) + "y", y.values(), reference.y, type);
        expect_close(name(s, type, offset) + "rstd", rstd.values(), reference.rstd, plain.rstd, DType::kFp32);

        const Tensor again(type, s.rows * s.columns);
        rmsnorm_recompute({.y = again.data(),
                           .rstd = rstd.get(),
                           .x = x.data(),
                           .weight = weight.data(),
                           .rows = s.rows,
                           .columns = s.columns,
                           .dtype = type},
                          nullptr);
        expect_same_bits(name(s, type, offset) + "recomputed y", y.read(), again.read());
      }
}

TEST(RmsNorm, BackwardMatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const Shape s : kShapes)
      for (const int64_t offset : {0, 1}) {
        const bool residual = (s.columns + offset) % 2 == 0;
        const Values v = make_values(s, type);
        const std::vector<float> rstd = forward_loop<float>(s, v).rstd;
        const Output output = run_backward(s, v, rstd, type, residual, offset);
        const auto reference = backward_loop<double>(s, v, rstd, residual);
        const auto plain = backward_loop<float>(s, v, rstd, residual);
        expect_close(name(s, type, offset) + "dx", output.dx, reference.dx, plain.dx, type,
                     reference.dx_magnitude);
        expect_close(name(s, type, offset) + "dweight", output.dweight, reference.dweight, plain.dweight,
                     DType::kFp32, reference.dweight_magnitude);
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
  const Output output = run_backward(s, v, rstd, DType::kBf16, true, 0);
  const auto reference = backward_loop<double>(s, v, rstd, true);
  for (size_t i = 0; i < v.residual.size(); ++i)
    EXPECT_NEAR(output.dx[i], reference.dx[i],
                std::abs(reference.dx[i]) / 256 + 1e-6 * reference.dx_magnitude[i])
        << "element " << i;
}

TEST(RmsNorm, AliasingGivesTheSameBits) {
  // A row in registers and one that is read twice.
  for (const Shape s : {Shape{9, 256}, Shape{2, 16392}})
    for (const DType type : kAllTypes) {
      const Values v = make_values(s, type);
      const std::vector<float> rstd_values = forward_loop<float>(s, v).rstd;
      const Output expected = run_backward(s, v, rstd_values, type, true, 0);
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

      const Tensor x(type, v.x), weight(type, v.weight), y(type, s.rows * s.columns), in_place(type, v.x);
      const DeviceArray<float> rstd(s.rows);
      RmsNormForward forward = {.y = y.data(),
                                .rstd = rstd.get(),
                                .x = x.data(),
                                .weight = weight.data(),
                                .rows = s.rows,
                                .columns = s.columns,
                                .epsilon = kEpsilon,
                                .dtype = type};
      rmsnorm_forward(forward, nullptr);
      forward.y = in_place.data();
      forward.x = in_place.data();
      rmsnorm_forward(forward, nullptr);
      expect_same_bits("y over x", y.read(), in_place.read());
      rmsnorm_recompute({.y = x.data(),
                         .rstd = rstd.get(),
                         .x = x.data(),
                         .weight = weight.data(),
                         .rows = s.rows,
                         .columns = s.columns,
                         .dtype = type},
                        nullptr);
      expect_same_bits("recomputed y over x", y.read(), x.read());
    }
}

TEST(RmsNorm, NonFiniteValuesStayInTheirRow) {
  const Shape s = {3, 40};
  Values v = make_values(s, DType::kBf16);
  v.x[40] = NAN;  // the second row
  const Tensor x(DType::kBf16, v.x), weight(DType::kBf16, v.weight), y(DType::kBf16, s.rows * s.columns);
  const DeviceArray<float> rstd(s.rows);
  rmsnorm_forward({.y = y.data(),
                   .rstd = rstd.get(),
                   .x = x.data(),
                   .weight = weight.data(),
                   .rows = s.rows,
                   .columns = s.columns,
                   .epsilon = kEpsilon,
                   .dtype = DType::kBf16},
                  nullptr);
  const std::vector<float> result = y.values(), rstds = rstd.values();
  for (int64_t i = 0; i < s.rows * s.columns; ++i)
    EXPECT_EQ(std::isnan(result[i]), i / s.columns == 1) << "element " << i;
  EXPECT_TRUE(std::isnan(rstds[1]));
}

TEST(RmsNorm, Repeatable) {
  for (const Shape s : {Shape{40, 256}, Shape{7, 4096}}) {
    const Values v = make_values(s, DType::kBf16);
    const std::vector<float> rstd = forward_loop<float>(s, v).rstd;
    expect_repeatable("rmsnorm_backward", [&] {
      Output output = run_backward(s, v, rstd, DType::kBf16, true, 0);
      output.dx.insert(output.dx.end(), output.dweight.begin(), output.dweight.end());
      return output.dx;
    });
  }
}

TEST(RmsNorm, SizesBeyond32Bits) {
  constexpr int64_t kRows = int64_t{1} << 24;
  constexpr int kColumns = 4096;
  EXPECT_EQ(rmsnorm_forward_cost(kRows, kColumns, DType::kBf16).flops, 4 * kRows * kColumns);
  EXPECT_EQ(rmsnorm_backward_cost(kRows, kColumns, true, DType::kBf16).bytes,
            4 * kRows * kColumns * 2 + kColumns * 2 + 4 * (kRows + kColumns));
  EXPECT_EQ(rmsnorm_backward_scratch(kRows, kColumns), rmsnorm_backward_scratch(2 * kRows, kColumns))
      << "scratch must not grow with the rows";
}

}  // namespace
}  // namespace minillm::kernels::testing
