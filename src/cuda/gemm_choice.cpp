#include "cuda/gemm_choice.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace minillm::cuda {

std::string describe(const GemmKey& key) {
  const auto operand = [](const char* name, bool transpose, int64_t rows, int64_t cols) {
    return std::string(name) + "[" + std::to_string(rows) + "," + std::to_string(cols) + "]" +
           (transpose ? " (transposed)" : "");
  };
  return "gemm D[" + std::to_string(key.m) + "," + std::to_string(key.n) + "] " +
         std::string(name_of(key.output)) + " = " + operand("A", key.transpose_a, key.m, key.k) + " " +
         std::string(name_of(key.input)) + " * " + operand("B", key.transpose_b, key.k, key.n) +
         (key.accumulate ? " + beta * C" : "") + (key.bias ? " + bias" : "") +
         (key.sm_limit > 0 ? " on " + std::to_string(key.sm_limit) + " multiprocessors" : "");
}

int fastest_candidate(std::span<const double> seconds) {
  constexpr double kWorthwhile = 0.98;
  const auto works = [](double value) { return std::isfinite(value); };
  const auto first = std::ranges::find_if(seconds, works);
  if (first == seconds.end()) return -1;
  const auto best = std::ranges::min_element(seconds);
  return static_cast<int>((*best <= kWorthwhile * *first ? best : first) - seconds.begin());
}

std::string describe(const GemmKey& key, const GemmChoice& choice) {
  const double flops =
      2.0 * static_cast<double>(key.m) * static_cast<double>(key.n) * static_cast<double>(key.k);
  char text[160];
  std::snprintf(text, sizeof text, ": candidate %d of %d, %.1f us, %.1f TFLOPS; cuBLASLt's first %.1f us",
                choice.candidate + 1, choice.candidates, choice.seconds * 1e6, flops / choice.seconds * 1e-12,
                choice.first_seconds * 1e6);
  return describe(key) + text;
}

}  // namespace minillm::cuda
