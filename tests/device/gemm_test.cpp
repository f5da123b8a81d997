// BlasLt against a float64 loop. The bound: at most twice the largest error of a plain fp32 loop that is
// rounded once to the output's type, the arithmetic that the contract promises.
#include "cuda/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "gemm_fixture.h"

namespace minillm::cuda {
namespace {

TEST(Gemm, MatchesFloat64InAllTranspositionsAndEpilogues) {
  Fixture fixture;
  const int64_t shapes[][3] = {{1, 1, 1},    {3, 5, 7},    {17, 33, 65},
                               {64, 64, 64}, {1, 40, 257}, {96, 128, 160}};
  for (const auto& [m, n, k] : shapes) {
    for (const Types types : kTypes) {
      for (int transposed = 0; transposed < 4; ++transposed) {
        Case t{m, n, k, types.input, types.output, transposed % 2 == 1, transposed / 2 == 1};
        fixture.compare(t);
        t.bias = true;
        fixture.compare(t);
        t.beta = 0.75f;
        fixture.compare(t);
        t.bias = false;
        t.beta = 1;
        t.c_is_d = true;
        fixture.compare(t);
      }
    }
  }
}

TEST(Gemm, TakesOperandsOfAnyAlignment) {
  Fixture fixture;
  for (const Types types : kTypes)
    for (const int64_t offset : {1, 3, 8})
      for (int transposed = 0; transposed < 4; ++transposed) {
        Case t{24, 40, 56, types.input, types.output, transposed % 2 == 1, transposed / 2 == 1, 1};
        t.c_is_d = t.bias = true;
        t.offset = offset;
        fixture.compare(t);
      }
}

TEST(Gemm, DoesNotReadCWhenBetaIsZero) {
  Fixture fixture;
  std::mt19937 random(3);
  const Case t{8, 8, 8, DType::kFp32, DType::kFp32, false, false};
  Operand a(t.input, 64, 0, random), b(t.input, 64, 0, random), d(t.output, 64, 0, random);
  check(cudaMemset(d.data(), 0xff, static_cast<size_t>(d.bytes())));  // NaN
  check(cudaStreamSynchronize(nullptr));
  fixture.blas().run(fixture.gemm(t, a, b, d, d, d), fixture.stream().get());
  fixture.stream().synchronize();
  for (const double value : d.download_values()) EXPECT_TRUE(std::isfinite(value));
}

TEST(Gemm, EqualRunsGiveEqualBits) {
  Fixture one, two;
  for (const Types types : kTypes) {
    const Case t{65, 127, 300, types.input, types.output, false, true};
    std::mt19937 random(11);
    Operand a(t.input, t.m * t.k, 0, random), b(t.input, t.k * t.n, 0, random);
    Operand d(t.output, t.m * t.n, 0, random), e(t.output, t.m * t.n, 0, random);
    one.blas().run(one.gemm(t, a, b, d, d, d), one.stream().get());
    two.blas().run(two.gemm(t, a, b, e, e, e), two.stream().get());
    one.stream().synchronize();
    two.stream().synchronize();
    const std::vector<std::byte> first = d.download();
    EXPECT_EQ(first, e.download());
    one.blas().run(one.gemm(t, a, b, d, d, d), one.stream().get());
    one.stream().synchronize();
    EXPECT_EQ(first, d.download());
  }
}

/// Runs `body` and returns the message of the Error that it throws.
template <class ErrorType, class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(Gemm, ErrorsNameTheShape) {
  Fixture fixture;
  std::mt19937 random(5);
  const Operand x(DType::kFp32, 64, 0, random), y(DType::kFp32, 64, 0, random),
      z(DType::kFp32, 64, 0, random);
  const Case t{4, 6, 8, DType::kFp32, DType::kFp32, true, false};
  const auto run = [&](auto change) {
    Gemm g = fixture.gemm(t, x, y, z, z, z);
    change(g);
    fixture.blas().run(g, fixture.stream().get());
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(message_of<InternalError>([&] { run([](Gemm& g) { g.m = 0; }); }), "D[0,6]");
  has(message_of<InternalError>([&] { run([](Gemm& g) { g.k = 0; }); }), "A[4,0] (transposed)");
  has(message_of<InternalError>([&] { run([](Gemm& g) { g.a = nullptr; }); }), "must not be null");
  has(message_of<InternalError>([&] { run([](Gemm& g) { g.beta = 1, g.c = nullptr; }); }),
      "c must not be null");
  const std::string text = message_of<DeviceError>([&] { run([](Gemm& g) { g.output = DType::kBf16; }); });
  has(text, "gemm D[4,6] bf16 = A[4,8] (transposed) fp32 * B[8,6]");
  has(text, "CUBLAS_STATUS_");
  has(message_of<InternalError>([&] { BlasLt(static_cast<std::byte*>(x.data()) + 16); }), "256-byte aligned");
}

/// The largest error of dW[out, in] = sum over chunks of dYᵀ · X, whose sum is kept in `type`, and the error
/// that fp32 sums may have: twice that of a plain fp32 loop.
struct WeightGradientErrors {
  double worst, allowed;
};
WeightGradientErrors chunked_weight_gradient(DType type, int64_t chunk) {
  constexpr int64_t kRows = 512, kOut = 24, kIn = 40;
  Fixture fixture;
  std::mt19937 random(13);
  Operand dy(DType::kBf16, kRows * kOut, 0, random), x(DType::kBf16, kRows * kIn, 0, random);
  Operand dw(type, kOut * kIn, 0, random);
  for (int64_t first = 0; first < kRows; first += chunk)
    fixture.blas().run({.m = kOut,
                        .n = kIn,
                        .k = chunk,
                        .a = static_cast<std::byte*>(dy.data()) + first * kOut * 2,
                        .transpose_a = true,
                        .b = static_cast<std::byte*>(x.data()) + first * kIn * 2,
                        .d = dw.data(),
                        .c = dw.data(),
                        .beta = first == 0 ? 0.0f : 1.0f,
                        .input = DType::kBf16,
                        .output = type},
                       fixture.stream().get());
  fixture.stream().synchronize();
  const Case whole{kOut, kIn, kRows, DType::kBf16, DType::kFp32, true, false};
  const std::vector<double> result = dw.download_values();
  WeightGradientErrors errors{0, 0};
  for (int64_t i = 0; i < kOut; ++i)
    for (int64_t j = 0; j < kIn; ++j) {
      const Sum<double> exact = element<double>(whole, dy, x, x, x, i, j);
      const float single = element<float>(whole, dy, x, x, x, i, j).value;
      const double error = std::fabs(result[static_cast<size_t>(i * kIn + j)] - exact.value);
      errors.worst = error <= errors.worst ? errors.worst : error;  // a NaN stays
      errors.allowed =
          std::max({errors.allowed, 2 * std::fabs(single - exact.value), 0x1p-23 * exact.magnitude});
    }
  return errors;
}

TEST(Gemm, Trap18_ChunkedWeightGradientsAreSummedInFp32) {
  const WeightGradientErrors one_shot = chunked_weight_gradient(DType::kFp32, 512);
  EXPECT_LE(one_shot.worst, one_shot.allowed);
  const WeightGradientErrors chunks = chunked_weight_gradient(DType::kFp32, 32);
  EXPECT_LE(chunks.worst, chunks.allowed);
  // The fault that this has to see: the same sum in bf16.
  const WeightGradientErrors rounded = chunked_weight_gradient(DType::kBf16, 32);
  EXPECT_GT(rounded.worst, 100 * rounded.allowed);
}

TEST(Gemm, Trap24_AnyLimitOfMultiprocessorsGivesTheProduct) {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  for (const int64_t limit : {0, 1, multiprocessors - 1, multiprocessors, 1 << 16}) {
    Fixture fixture(limit);
    Case t{96, 128, 160, DType::kBf16, DType::kBf16, false, true};
    t.bias = true;
    fixture.compare(t);
    const int effective = limit < multiprocessors ? static_cast<int>(limit) : 0;
    EXPECT_EQ(fixture.blas().shapes().at(0).sm_limit, effective) << limit;
  }
}

TEST(Gemm, CostCountsEachOperandOnce) {
  Gemm g;
  g.m = 2, g.n = 3, g.k = 5;
  EXPECT_EQ(gemm_cost(g).flops, 60);
  EXPECT_EQ(gemm_cost(g).bytes, 2 * (10 + 15 + 6));
  g.output = DType::kFp32;
  g.beta = 1;
  g.bias = &g;
  EXPECT_EQ(gemm_cost(g).bytes, 2 * (10 + 15) + 4 * (6 + 6 + 3));
}

}  // namespace
}  // namespace minillm::cuda
