// Which of cuBLASLt's algorithms a product uses: the shape that it is chosen for, and the choice.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <span>
#include <string>

#include "core/dtype.h"

namespace minillm::cuda {

/// All that an algorithm may depend on: equal keys, equal algorithm, equal bits. In the row-major terms of
/// Gemm.
struct GemmKey {
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false, transpose_b = false;
  bool accumulate = false;  ///< beta is not 0
  bool bias = false;
  DType input = DType::kBf16, output = DType::kBf16;
  /// The largest powers of two, up to 256, that divide the addresses. Without accumulation C's is D's,
  /// without a bias its is 0.
  uint32_t align_a = 256, align_b = 256, align_c = 256, align_d = 256, align_bias = 0;
  int sm_limit = 0;  ///< multiprocessors that the product is planned for; 0: all

  auto operator<=>(const GemmKey&) const = default;
};

/// "gemm D[4,6] bf16 = A[4,8] (transposed) bf16 * B[8,6] + beta * C + bias".
std::string describe(const GemmKey& key);

/// cublasLtMatmulAlgo_t: opaque, and valid for one version of cuBLASLt.
using GemmAlgorithm = std::array<uint64_t, 8>;

/// The fastest of the candidates that cuBLASLt's heuristic offers.
struct GemmChoice {
  GemmAlgorithm algorithm{};
  int candidate = 0;   ///< its number, from 0, in the heuristic's order
  int candidates = 1;  ///< how many were timed
  double seconds = 0;
  double first_seconds = 0;  ///< of the heuristic's first

  bool operator==(const GemmChoice&) const = default;
};

/// The candidate to take, given the seconds of each: the fastest, but the first that works unless another is
/// 2 % faster, which noise is not. Infinite: it does not work; -1: none does.
int fastest_candidate(std::span<const double> seconds);

/// Shape, candidate, times and TFLOPS on one line.
std::string describe(const GemmKey& key, const GemmChoice& choice);

}  // namespace minillm::cuda
