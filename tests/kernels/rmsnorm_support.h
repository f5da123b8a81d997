// What the tests of RMSNorm share: values, float64 loops, and the operations on tensors of their own.
#pragma once

#include "kernels/rmsnorm.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {

struct Shape {
  int64_t rows;
  int columns;
};

inline constexpr float kEpsilon = 1e-5f;

/// Tensors of one problem, rounded to the type.
struct Values {
  std::vector<float> x, weight, dy, residual;
};
inline Values make_values(Shape s, DType type) {
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

/// Which tensors of an operation start `offset` elements after a 256-byte boundary: bit i stands for the
/// i-th.
struct Misaligned {
  int64_t offset = 0;
  unsigned tensors = ~0u;
  int64_t of(int tensor) const { return (tensors >> tensor & 1) != 0 ? offset : 0; }
};

/// y of RmsNormForward or, with a residual, of RmsNormResidualForward, each tensor of its own.
struct Forward {
  Forward(Shape s, const Values& v, DType type, bool residual, Misaligned at = {})
      : x(type, v.x, at.of(0)),
        residual(type, v.residual, at.of(1)),
        weight(type, v.weight, at.of(2)),
        y(type, s.rows * s.columns, at.of(3)),
        sum(type, s.rows * s.columns, at.of(4)),
        rstd(s.rows) {
    if (residual) {
      rmsnorm_residual_forward(residual_arguments(s), nullptr);
    } else {
      rmsnorm_forward({.y = y.data(),
                       .rstd = rstd.get(),
                       .x = x.data(),
                       .weight = weight.data(),
                       .rows = s.rows,
                       .columns = s.columns,
                       .epsilon = kEpsilon,
                       .dtype = type},
                      nullptr);
    }
  }
  RmsNormResidualForward residual_arguments(Shape s) const {
    return {.sum = sum.data(),
            .y = y.data(),
            .rstd = rstd.get(),
            .x = x.data(),
            .residual = residual.data(),
            .weight = weight.data(),
            .rows = s.rows,
            .columns = s.columns,
            .epsilon = kEpsilon,
            .dtype = x.type()};
  }
  /// y again, from x or from the sum.
  std::vector<std::byte> recomputed(Shape s, const Tensor& from) const {
    const Tensor again(x.type(), s.rows * s.columns);
    rmsnorm_recompute({.y = again.data(),
                       .rstd = rstd.get(),
                       .x = from.data(),
                       .weight = weight.data(),
                       .rows = s.rows,
                       .columns = s.columns,
                       .dtype = x.type()},
                      nullptr);
    return again.read();
  }

  Tensor x, residual, weight, y, sum;
  DeviceArray<float> rstd;
};

struct Output {
  std::vector<float> dx, dweight;
};
/// Runs the backward pass with dx in a tensor of its own; the inputs stay as they are. `before`: what dweight
/// holds, to be accumulated to; empty: poison, to be replaced.
inline Output run_backward(Shape s, const Values& v, const std::vector<float>& rstds, DType type,
                           bool residual, Misaligned at = {}, int scratch_byte = 0xFF,
                           const std::vector<float>& before = {}) {
  const Tensor x(type, v.x, at.of(0)), weight(type, v.weight, at.of(1)), dy(type, v.dy, at.of(2)),
      res(type, v.residual, at.of(3)), dx(type, s.rows * s.columns, at.of(4));
  const DeviceArray<float> rstd(rstds);
  DeviceArray<float> dweight(s.columns);
  if (!before.empty()) dweight.set(before);
  const DeviceBytes scratch(rmsnorm_backward_scratch(s.rows, s.columns), 4 * at.of(5));
  check(cudaMemset(scratch.data(), scratch_byte, scratch.bytes()));
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
                    .dtype = type,
                    .accumulate = !before.empty()},
                   nullptr);
  for (const auto& [input, values] :
       {std::pair{&x, &v.x}, {&weight, &v.weight}, {&dy, &v.dy}, {&res, &v.residual}})
    expect_same_bits("an input", input->read(), Tensor(type, *values).read());
  expect_same_bits("rstd", rstd.values(), rstds);
  return {dx.values(), dweight.values()};
}

inline std::string name(Shape s, DType type, int64_t offset) {
  return std::to_string(s.rows) + " x " + std::to_string(s.columns) + " " + std::string(name_of(type)) +
         (offset != 0 ? " at element " + std::to_string(offset) + " " : " ");
}

}  // namespace minillm::kernels::testing
