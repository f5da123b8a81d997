// Numbers in text from outside: command lines, environment variables, metadata of files.
#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <optional>
#include <string_view>

namespace minillm {

/// The whole of `text` as a decimal number, leading zeros allowed: "007" is 7. Nothing for other text
/// (spaces, a plus sign, hexadecimal digits, "inf", "nan") and for what `Number` cannot hold.
template <typename Number>
requires std::integral<Number> || std::floating_point<Number> std::optional<Number> parse_number(
    std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  if constexpr (std::floating_point<Number>)
    if (!std::isfinite(value)) return std::nullopt;
  return value;
}

}  // namespace minillm
