// Numbers in text for people.
#pragma once

#include <cstdio>
#include <string>

namespace minillm {

/// printf to a string; `pattern` is a literal that fits `values`.
template <class... Values>
std::string format(const char* pattern, Values... values) {
  std::string text(static_cast<size_t>(std::snprintf(nullptr, 0, pattern, values...)), '\0');
  std::snprintf(text.data(), text.size() + 1, pattern, values...);
  return text;
}

}  // namespace minillm
