// Memory of a worker: stacks of its fibers, shared memory of its blocks.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <system_error>

#include "sim/sanitizer.h"

namespace sim {

// Sanitizers' frames are several times larger.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr size_t kStackBytes = 256 << 10;
#else
inline constexpr size_t kStackBytes = 64 << 10;
#endif
inline constexpr size_t kGuardBytes = 4096;
inline constexpr size_t kSharedAlignment = 128;

/// memset would be intercepted, and the poison seen as a write that races with the block's own.
SIM_INVISIBLE inline void poison(void* memory, size_t bytes) {
  auto* end = static_cast<volatile unsigned char*>(memory) + bytes;
  auto* word = static_cast<volatile uint64_t*>(memory);
  for (; bytes >= sizeof(uint64_t); bytes -= sizeof(uint64_t)) *word++ = ~uint64_t{0};
  for (; bytes > 0; --bytes) end[-static_cast<ptrdiff_t>(bytes)] = 0xff;
}

/// Invisible: an allocation counts as a write by the fiber that happens to make it.
inline void* allocate_shared(size_t bytes) {
  const InvisibleScope invisible;
  void* memory = nullptr;
  if (posix_memalign(&memory, kSharedAlignment, bytes) != 0) throw std::bad_alloc();
  return memory;
}

/// A stack with an unmapped page below it: an overflow stops the process instead of changing a neighbour.
inline StackBounds allocate_stack(size_t bytes) {
  void* memory = mmap(nullptr, bytes + kGuardBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0)
    throw std::system_error(errno, std::generic_category(), "stack of a simulated CUDA thread");
  return {static_cast<char*>(memory) + kGuardBytes, bytes};
}

inline void free_stack(const StackBounds& stack) {
  asan_forget(stack);  // what frames left poisoned would be found by whoever maps these addresses next
  munmap(stack.bottom - kGuardBytes, stack.bytes + kGuardBytes);
}

}  // namespace sim
