// BlasLt against a float64 loop. The bound: at most twice the largest error of a plain fp32 loop that is
// rounded once to the output's type, the arithmetic that the contract promises.
#include "cuda/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bits.h"
#include "core/error.h"
#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

namespace minillm::cuda {
namespace {

/// Values that are exact in `type`, on the host as double and on the device. Guard bytes lie around the
/// elements, which start `offset` elements after a 256-byte boundary.
class Operand {
 public:
  Operand(DType type, int64_t count, int64_t offset, std::mt19937& random)
      : type_(type), values(static_cast<size_t>(count)), offset_(kGuard + offset * size_of(type)) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (double& value : values) {
      const float x = uniform(random);
      value = type == DType::kFp32 ? x : test::bf16_value(test::nearest_bf16(x));
    }
    memory_ = DeviceMemory(offset_ + bytes() + kGuard);
    check(cudaMemset(memory_.data(), kPattern, static_cast<size_t>(memory_.bytes())));
    upload();
  }

  void* data() const { return memory_.data() + offset_; }
  int64_t bytes() const { return static_cast<int64_t>(values.size()) * size_of(type_); }

  std::vector<std::byte> download() const {
    std::vector<std::byte> all(static_cast<size_t>(memory_.bytes()));
    check(cudaMemcpy(all.data(), memory_.data(), all.size(), cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < memory_.bytes(); ++i) {
      const bool guard = i < offset_ || i >= offset_ + bytes();
      if (guard && all[static_cast<size_t>(i)] != std::byte{kPattern}) {
        ADD_FAILURE() << "guard byte " << i - offset_ << " was overwritten";
        break;
      }
    }
    return {all.begin() + offset_, all.begin() + offset_ + bytes()};
  }

  std::vector<double> download_values() const {
    const std::vector<std::byte> raw = download();
    std::vector<double> result(values.size());
    for (size_t i = 0; i < result.size(); ++i) {
      if (type_ == DType::kFp32) {
        float value;
        std::memcpy(&value, &raw[i * 4], 4);
        result[i] = value;
      } else {
        uint16_t bits;
        std::memcpy(&bits, &raw[i * 2], 2);
        result[i] = test::bf16_value(bits);
      }
    }
    return result;
  }

 private:
  void upload() {
    std::vector<std::byte> raw(static_cast<size_t>(bytes()));
    for (size_t i = 0; i < values.size(); ++i) {
      if (type_ == DType::kFp32) {
        const float value = static_cast<float>(values[i]);
        std::memcpy(&raw[i * 4], &value, 4);
      } else {
        const uint16_t bits = test::nearest_bf16(values[i]);
        std::memcpy(&raw[i * 2], &bits, 2);
      }
    }
    check(cudaMemcpy(data(), raw.data(), raw.size(), cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));  // the tests' streams do not wait for the default one
  }

  static constexpr int64_t kGuard = 256;
  static constexpr unsigned char kPattern = 0xa5;
  DType type_;

 public:
  std::vector<double> values;

 private:
  int64_t offset_;
  DeviceMemory memory_;
};

struct Case {
  int64_t m, n, k;
  DType input, output;
  bool transpose_a, transpose_b;
  float beta = 0;
  bool c_is_d = false, bias = false;
  int64_t offset = 0;
};

/// The terms of an element of D in float64, and their sum in T before it is rounded to the output's type.
template <class T>
struct Sum {
  T value = 0;
  double magnitude = 0;
  void add(double x, double y) {
    value += static_cast<T>(x) * static_cast<T>(y);
    magnitude += std::fabs(x * y);
  }
};

template <class T>
Sum<T> element(const Case& t, const Operand& a, const Operand& b, const Operand& c, const Operand& bias,
               int64_t i, int64_t j) {
  Sum<T> sum;
  for (int64_t l = 0; l < t.k; ++l) {
    const auto at = static_cast<size_t>(t.transpose_a ? l * t.m + i : i * t.k + l);
    const auto bt = static_cast<size_t>(t.transpose_b ? j * t.k + l : l * t.n + j);
    sum.add(a.values[at], b.values[bt]);
  }
  if (t.beta != 0) sum.add(t.beta, c.values[static_cast<size_t>(i * t.n + j)]);
  if (t.bias) sum.add(1, bias.values[static_cast<size_t>(j)]);
  return sum;
}

class Fixture {
 public:
  Fixture() : workspace_(BlasLt::workspace_bytes()), blas_(workspace_.data()) {}

  Gemm gemm(const Case& t, const Operand& a, const Operand& b, const Operand& c, const Operand& d,
            const Operand& bias) const {
    Gemm g;
    g.m = t.m, g.n = t.n, g.k = t.k;
    g.a = a.data(), g.transpose_a = t.transpose_a;
    g.b = b.data(), g.transpose_b = t.transpose_b;
    g.d = d.data();
    g.c = t.c_is_d ? d.data() : c.data();
    g.beta = t.beta;
    g.bias = t.bias ? bias.data() : nullptr;
    g.input = t.input, g.output = t.output;
    return g;
  }

  void compare(const Case& t) {
    std::mt19937 random(7);
    Operand a(t.input, t.m * t.k, t.offset, random), b(t.input, t.k * t.n, t.offset, random);
    Operand d(t.output, t.m * t.n, t.offset, random), c(t.output, t.m * t.n, t.offset, random);
    Operand bias(t.output, t.n, t.offset, random);
    blas_.run(gemm(t, a, b, c, d, bias), stream_.get());
    stream_.synchronize();
    const Operand& added = t.c_is_d ? d : c;
    const std::vector<double> result = d.download_values();
    constexpr double kUnitRoundoff = 0x1p-24;
    double worst = 0, single_worst = 0;
    for (int64_t i = 0; i < t.m; ++i) {
      for (int64_t j = 0; j < t.n; ++j) {
        const Sum<double> exact = element<double>(t, a, b, added, bias, i, j);
        const float single = element<float>(t, a, b, added, bias, i, j).value;
        const double rounded =
            t.output == DType::kFp32 ? single : test::bf16_value(test::nearest_bf16(single));
        const double error = std::fabs(result[static_cast<size_t>(i * t.n + j)] - exact.value);
        worst = error <= worst ? worst : error;  // a NaN stays
        single_worst =
            std::max({single_worst, std::fabs(rounded - exact.value), kUnitRoundoff * exact.magnitude});
      }
    }
    const double allowed = 2 * single_worst;
    EXPECT_LE(worst, allowed) << "m " << t.m << " n " << t.n << " k " << t.k << " input " << name_of(t.input)
                              << " output " << name_of(t.output) << " transposed " << t.transpose_a
                              << t.transpose_b << " beta " << t.beta << (t.c_is_d ? " in place" : "")
                              << (t.bias ? " bias" : "") << " offset " << t.offset;
  }

  BlasLt& blas() { return blas_; }
  const Stream& stream() const { return stream_; }

 private:
  DeviceMemory workspace_;
  BlasLt blas_;
  Stream stream_;
};

struct Types {
  DType input, output;
};
constexpr Types kTypes[] = {
    {DType::kBf16, DType::kBf16}, {DType::kBf16, DType::kFp32}, {DType::kFp32, DType::kFp32}};

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
