// What every kernel test needs: device memory that notices what a kernel must not do, host arithmetic in the
// tensors' precision, the tolerance rule and the repeatability check.
//
// A test of an op builds Tensors from host values (rounded to the tensor's type, so that kernel and reference
// start from the same numbers), runs the op on the default stream, and compares with a float64 loop of its
// own. Outputs and scratch start as NaN patterns; each Tensor checks its guard bands when it is destroyed.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "tests/sanitizers.h"
#if defined(MINILLM_SIM)
#include "sim/control.h"
#endif

namespace minillm::kernels::testing {

inline constexpr DType kAllTypes[] = {DType::kFp32, DType::kBf16};

using test::kSanitized;
using test::kThreadSanitized;

inline void check(cudaError_t code, std::source_location where = std::source_location::current()) {
  if (code != cudaSuccess)
    throw std::runtime_error(std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": " +
                             cudaGetErrorString(code));
}

// Rounding
// ---------------------------------------------------------------------------------------------------

inline float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

/// To nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/// `value` as an element of `type` holds it.
inline float rounded(float value, DType type) {
  return type == DType::kFp32 ? value : bf16_to_float(float_to_bf16(value));
}

inline std::vector<float> rounded(std::vector<float> values, DType type) {
  for (float& value : values) value = rounded(value, type);
  return values;
}

/// Distance between neighbouring numbers of `type` at `value`.
inline double ulp(double value, DType type) {
  const int exponent = value == 0 ? -126 : std::max(std::ilogb(value), -126);
  return std::ldexp(1.0, exponent - (type == DType::kFp32 ? 23 : 7));
}

// Values
// -----------------------------------------------------------------------------------------------------

/// `count` values of N(0, scale²), the same for the same seed.
inline std::vector<float> normal_values(int64_t count, uint32_t seed, float scale = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

/// `count` values of U(low, high).
inline std::vector<float> uniform_values(int64_t count, uint32_t seed, float low, float high) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> distribution(low, high);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(generator);
  return values;
}

// Device memory
// ----------------------------------------------------------------------------------------------

/// Device bytes between two guard bands. New contents are 0xFF bytes: NaN as fp32 or bf16, -1 as an integer.
class DeviceBytes {
 public:
  /// The first byte lies `offset` bytes after a 256-byte boundary.
  explicit DeviceBytes(int64_t bytes, int64_t offset = 0) : bytes_(bytes), front_(kGuard + offset) {
    check(cudaMalloc(&base_, front_ + bytes_ + kGuard));
    check(cudaMemset(base_, kGuardByte, front_ + bytes_ + kGuard));
    poison();
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() {
    expect_guards_intact();
    (void)cudaFree(base_);
  }

  void* data() const { return static_cast<std::byte*>(base_) + front_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  int64_t bytes() const { return bytes_; }

  void poison() { check(cudaMemset(data(), 0xFF, bytes_)); }

  /// Replaces the whole contents.
  void write(std::span<const std::byte> from) {
    if (std::ssize(from) != bytes_) throw std::logic_error("DeviceBytes::write: wrong size");
    if (bytes_ > 0) check(cudaMemcpy(data(), from.data(), bytes_, cudaMemcpyHostToDevice));
  }

  /// The contents after all work on the device has ended.
  std::vector<std::byte> read() const { return read_range(front_, bytes_); }

  void expect_guards_intact() const {
    const auto intact = [](const std::vector<std::byte>& band) {
      return std::ranges::all_of(band, [](std::byte b) { return b == std::byte{kGuardByte}; });
    };
    EXPECT_TRUE(intact(read_range(0, front_))) << "a kernel wrote before the beginning of a tensor";
    EXPECT_TRUE(intact(read_range(front_ + bytes_, kGuard))) << "a kernel wrote past the end of a tensor";
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr int kGuardByte = 0xA5;

  std::vector<std::byte> read_range(int64_t first, int64_t count) const {
    std::vector<std::byte> result(count);
    check(cudaDeviceSynchronize());
    if (count > 0)
      check(cudaMemcpy(result.data(), static_cast<std::byte*>(base_) + first, count, cudaMemcpyDeviceToHost));
    return result;
  }

  void* base_ = nullptr;
  int64_t bytes_, front_;
};

/// Elements of a plain type (float, int32_t, float2, …).
template <class T>
class DeviceArray : public DeviceBytes {
 public:
  explicit DeviceArray(int64_t count) : DeviceBytes(count * static_cast<int64_t>(sizeof(T))) {}
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::ssize(values)) { set(values); }

  T* get() const { return as<T>(); }
  void set(const std::vector<T>& values) { write(std::as_bytes(std::span(values))); }
  std::vector<T> values() const {
    const std::vector<std::byte> raw = read();
    std::vector<T> result(raw.size() / sizeof(T));
    if (!raw.empty()) std::memcpy(result.data(), raw.data(), raw.size());
    return result;
  }
};

/// Elements of fp32 or bf16, seen from the host as float. `offset` elements misalign it.
class Tensor : public DeviceBytes {
 public:
  Tensor(DType type, int64_t count, int64_t offset = 0)
      : DeviceBytes(count * size_of(type), offset * size_of(type)), type_(type) {}
  Tensor(DType type, const std::vector<float>& values, int64_t offset = 0)
      : Tensor(type, std::ssize(values), offset) {
    set(values);
  }

  DType type() const { return type_; }

  void set(const std::vector<float>& values) {
    if (type_ == DType::kFp32) return write(std::as_bytes(std::span(values)));
    std::vector<uint16_t> bits(values.size());
    std::ranges::transform(values, bits.begin(), float_to_bf16);
    write(std::as_bytes(std::span(bits)));
  }

  std::vector<float> values() const {
    const std::vector<std::byte> raw = read();
    std::vector<float> result(raw.size() / size_of(type_));
    if (raw.empty()) return result;
    if (type_ == DType::kFp32) {
      std::memcpy(result.data(), raw.data(), raw.size());
      return result;
    }
    std::vector<uint16_t> bits(result.size());
    std::memcpy(bits.data(), raw.data(), raw.size());
    std::ranges::transform(bits, result.begin(), bf16_to_float);
    return result;
  }

 private:
  DType type_;
};

// Comparison
// -------------------------------------------------------------------------------------------------

/// Largest |value - reference| in units of `type` at `magnitude` (at the reference when magnitude is empty),
/// and where it is. Infinite where one is not finite and the other is not the same non-finite value.
struct Error {
  double units = 0;
  int64_t index = 0;
};
inline Error largest_error(std::span<const float> values, std::span<const double> reference, DType type,
                           std::span<const double> magnitude = {}) {
  Error largest;
  for (int64_t i = 0; i < std::ssize(reference); ++i) {
    const double value = values[i], expected = reference[i];
    double units = 0;
    if (!std::isfinite(value) || !std::isfinite(expected)) {
      const bool same = std::isnan(expected) ? std::isnan(value) : value == expected;
      units = same ? 0 : std::numeric_limits<double>::infinity();
    } else {
      units = std::abs(value - expected) / ulp(magnitude.empty() ? expected : magnitude[i], type);
    }
    if (units > largest.units) largest = {units, i};
  }
  return largest;
}

/// The tolerance rule: against the float64 `reference`, `actual` is at most twice as wrong as `plain`, the
/// same formula in fp32 rounded once to `type`, plus one unit in the last place. Both errors are the largest
/// of the tensor. For sums of terms that may cancel give the sum of their absolute values as `magnitude`: no
/// order of summation bounds the error relative to the result.
inline void expect_close(const std::string& what, std::span<const float> actual,
                         std::span<const double> reference, std::span<const float> plain, DType type,
                         std::span<const double> magnitude = {}) {
  ASSERT_EQ(actual.size(), reference.size()) << what;
  ASSERT_EQ(plain.size(), reference.size()) << what;
  const std::vector<float> plain_rounded = rounded(std::vector<float>(plain.begin(), plain.end()), type);
  const double allowed = 2 * largest_error(plain_rounded, reference, type, magnitude).units + 1;
  ASSERT_TRUE(std::isfinite(allowed)) << what << ": the fp32 loop of the test is wrong";
  const Error error = largest_error(actual, reference, type, magnitude);
  if (error.units <= allowed) return;
  ADD_FAILURE() << what << ": element " << error.index << " is " << actual[error.index] << ", float64 gives "
                << reference[error.index] << ": off by " << error.units << " units of " << name_of(type)
                << ", allowed are " << allowed;
}

/// For elementwise formulas stored as bf16: all but a few elements are the correctly rounded float64 result.
/// fp32 errors move one in thousands across a rounding boundary; rounding a factor to bf16 first, which
/// `expect_close` tolerates, moves one in four. Does nothing for fp32.
inline void expect_rounded_once(const std::string& what, std::span<const float> actual,
                                std::span<const double> reference, DType type) {
  if (type == DType::kFp32) return;
  ASSERT_EQ(actual.size(), reference.size()) << what;
  int64_t different = 0;
  for (size_t i = 0; i < actual.size(); ++i)
    different += actual[i] != rounded(static_cast<float>(reference[i]), type);
  EXPECT_LE(different, std::ssize(actual) / 100 + 1) << what << ": rounded more than once?";
}

/// Equality of bits, so that NaN equals itself and -0 differs from 0.
inline void expect_same_bits(const std::string& what, std::span<const std::byte> a,
                             std::span<const std::byte> b) {
  ASSERT_EQ(a.size(), b.size()) << what;
  const auto [at, unused] = std::ranges::mismatch(a, b);
  EXPECT_EQ(at - a.begin(), std::ssize(a)) << what << ": first difference at this byte";
}
inline void expect_same_bits(const std::string& what, const std::vector<float>& a,
                             const std::vector<float>& b) {
  expect_same_bits(what, std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

/// Runs of a repeatability test. The sanitizers look at one run; they need not see a hundred.
inline constexpr int kRepeats = kSanitized ? 4 : 100;

/// Calls `run`, which launches the op on fresh inputs and returns its outputs, kRepeats times; on the
/// simulated device with blocks and threads in another order each time, and with the instructions of a warp
/// one by one. Give it small tensors.
template <class Run>
void expect_repeatable(const std::string& what, const Run& run) {
  const auto first = run();
#if defined(MINILLM_SIM)
  const sim::Order before = sim::settings().order;
  for (int repeat = 1; repeat < kRepeats; ++repeat) {
    const std::string order = repeat == 1   ? "stepwise"
                              : repeat == 2 ? "reverse"
                                            : "shuffle:" + std::to_string(repeat);
    sim::set_order(order);
    expect_same_bits(what + " in order " + order, first, run());
    if (::testing::Test::HasFailure()) break;
  }
  sim::set_order(before);
#else
  for (int repeat = 1; repeat < kRepeats && !::testing::Test::HasFailure(); ++repeat)
    expect_same_bits(what, first, run());
#endif
}

}  // namespace minillm::kernels::testing
