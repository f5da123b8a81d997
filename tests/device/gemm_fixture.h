// What the tests of matrix products share: operands with guard bands, and products compared with a float64
// loop.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "bits.h"
#include "cuda/check.h"
#include "cuda/gemm.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

namespace minillm::cuda {

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
  explicit Fixture(int64_t sm_limit = 0)
      : workspace_(BlasLt::workspace_bytes()), blas_(workspace_.data(), sm_limit) {}

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
inline constexpr Types kTypes[] = {
    {DType::kBf16, DType::kBf16}, {DType::kBf16, DType::kFp32}, {DType::kFp32, DType::kFp32}};

}  // namespace minillm::cuda
