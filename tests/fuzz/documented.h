// What a parser may throw for any input.
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"

namespace minillm::test {

/// Runs `parse`; mistakes of users and of files are no defects, all else is.
template <class Parse>
int expect_documented(Parse&& parse) {
  try {
    parse();
  } catch (const UsageError&) {
  } catch (const InputError&) {
  }
  return 0;
}

inline std::string text_of(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

}  // namespace minillm::test
