// What an operation has to do at least: the floor that its time is compared with.
#pragma once

#include <cstdint>

namespace minillm {

/// Minimal device-memory traffic (each input read once, each output written once) and floating-point
/// operations (a fused multiply-add counts as two) of one call.
struct Cost {
  int64_t bytes = 0;
  int64_t flops = 0;
  /// Traffic of the implementation beyond `bytes`: scratch written and read again, operands read twice (from
  /// device memory, as far as caches cannot be relied on).
  int64_t extra_bytes = 0;
};

}  // namespace minillm
