// Integer arithmetic that throws instead of being silently wrong.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <utility>

#include "core/error.h"

namespace minillm {

/// a / b for a divisible by b. Throws InternalError otherwise, or when b is not positive.
constexpr int64_t div_exact(int64_t a, int64_t b) {
  if (b <= 0 || a % b != 0)
    throw InternalError("div_exact: " + std::to_string(a) + " is not a multiple of " + std::to_string(b));
  return a / b;
}

/// Smallest integer >= a / b, for a >= 0 and b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// Smallest multiple of `multiple` that is >= a, for a >= 0 and multiple > 0.
constexpr int64_t round_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

/// Converts between integer types. Throws InternalError when the value does not fit.
template <std::integral To, std::integral From>
constexpr To narrow(From value) {
  if (!std::in_range<To>(value)) throw InternalError("narrow: " + std::to_string(value) + " does not fit");
  return static_cast<To>(value);
}

}  // namespace minillm
