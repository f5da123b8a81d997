// What a CUDA thread did wrong, as exceptions: off the hot path of the collectives that check for it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace sim {

inline std::string hexadecimal(uint32_t value) {
  char text[11];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

/// Caught at the end of the fiber, where kernel, block and thread are added.
[[noreturn, gnu::cold]] inline void fail(const std::string& what) {
  throw std::runtime_error(what);
}

[[noreturn, gnu::cold]] inline void fail_mask(const char* operation, uint32_t mask, unsigned lane,
                                              uint32_t existing) {
  const std::string call = std::string(operation) + ": mask " + hexadecimal(mask);
  if ((mask >> lane & 1) == 0) fail(call + " lacks the caller's lane " + std::to_string(lane));
  fail(call + " names lanes beyond the " + std::to_string(std::popcount(existing)) + " threads of the warp");
}

[[noreturn, gnu::cold]] inline void fail_meeting(const char* operation, const char* others) {
  fail(std::string(operation) + " meets " + others + " of other lanes of its warp");
}

[[noreturn, gnu::cold]] inline void fail_width(const char* operation, int width) {
  fail(std::string(operation) + ": width " + std::to_string(width) + " is not a power of 2 up to 32");
}

}  // namespace sim
