// Device and pinned host memory: plain host memory of exactly the size asked for, so that AddressSanitizer
// guards its ends; every allocation is tracked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "sim/driver_types.h"

namespace sim {

/// Thread safe.
class Memory {
 public:
  enum class Kind { kPageable, kPinned, kDevice };

  Memory() = default;
  /// Prints what was not freed and, if there is anything, ends the process with kLeakExitCode.
  ~Memory();

  /// 256-byte aligned, from 4096 bytes on page aligned, filled with 0xFF. Nullptr when device memory would
  /// exceed settings().memory_bytes, or the host has no more.
  void* allocate(Kind kind, size_t bytes);
  /// False when `pointer` is not the start of a `kind` allocation.
  bool release(Kind kind, void* pointer);

  struct Range {
    Kind kind = Kind::kPageable;
    bool inside = true;  ///< false: begins in an allocation and leaves it
  };
  Range classify(const void* pointer, size_t bytes);
  int64_t device_bytes();

 private:
  struct Allocation {
    Kind kind;
    size_t bytes;
    int64_t sequence;
  };
  std::mutex mutex_;
  std::map<uintptr_t, Allocation> allocations_;
  int64_t device_bytes_ = 0;
  int64_t sequence_ = 0;
};

}  // namespace sim
