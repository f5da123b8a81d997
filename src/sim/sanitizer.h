// The sanitizers' views of fibers and ordering; nothing in builds without them.
//
// ThreadSanitizer must see exactly the ordering that CUDA promises. A switch of fibers therefore orders
// nothing (kNoSync), the simulator's own bookkeeping on device fibers is SIM_INVISIBLE, and each promise is
// one tsan_release/tsan_acquire pair on a key of its own.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_THREAD__)
#define SIM_INVISIBLE __attribute__((no_sanitize("thread"), noinline))
#define SIM_FLAT SIM_INVISIBLE
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* key);
void __tsan_release(void* key);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
}
#else
#define SIM_INVISIBLE
// Everything inlined: after a switch of fibers each return on the way out is mispredicted.
#define SIM_FLAT __attribute__((flatten))
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace sim {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
SIM_INVISIBLE inline void* tsan_current_fiber() {
  return __tsan_get_current_fiber();
}
SIM_INVISIBLE inline void* tsan_create_fiber() {
  return __tsan_create_fiber(0);
}
SIM_INVISIBLE inline void tsan_destroy_fiber(void* fiber) {
  __tsan_destroy_fiber(fiber);
}
SIM_INVISIBLE inline void tsan_switch_to(void* fiber) {
  constexpr unsigned kNoSync = 1;
  __tsan_switch_to_fiber(fiber, kNoSync);
}
SIM_INVISIBLE inline void tsan_acquire(void* key) {
  __tsan_acquire(key);
}
SIM_INVISIBLE inline void tsan_release(void* key) {
  __tsan_release(key);
}
#else
inline constexpr bool kThreadSanitizer = false;
inline void* tsan_current_fiber() {
  return nullptr;
}
inline void* tsan_create_fiber() {
  return nullptr;
}
inline void tsan_destroy_fiber(void*) {}
inline void tsan_switch_to(void*) {}
inline void tsan_acquire(void*) {}
inline void tsan_release(void*) {}
#endif

/// What code that is not instrumented (libc, oneDNN, MPI) reads and writes for an operation.
#if defined(__SANITIZE_THREAD__)
inline void announce_read(const void* address, size_t bytes) {
  __tsan_read_range(const_cast<void*>(address), bytes);
}
inline void announce_write(void* address, size_t bytes) {
  __tsan_write_range(address, bytes);
}
#else
inline void announce_read(const void*, size_t) {}
inline void announce_write(void*, size_t) {}
#endif

/// While it lives, ThreadSanitizer ignores this thread's accesses and synchronisation: for shared bookkeeping
/// under a mutex, which would otherwise order the streams that take it.
class InvisibleScope {
 public:
#if defined(__SANITIZE_THREAD__)
  SIM_INVISIBLE InvisibleScope() {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  SIM_INVISIBLE ~InvisibleScope() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
#else
  InvisibleScope() {}
  ~InvisibleScope() {}
#endif
  InvisibleScope(const InvisibleScope&) = delete;
  InvisibleScope& operator=(const InvisibleScope&) = delete;
};

/// A stack that fibers switch to and from, as AddressSanitizer must know it.
struct StackBounds {
  char* bottom = nullptr;
  size_t bytes = 0;

  char* top() const { return bottom + bytes; }
};
#if defined(__SANITIZE_ADDRESS__)
inline void asan_leave(void** fake_stack, const StackBounds& next) {
  __sanitizer_start_switch_fiber(fake_stack, next.bottom, next.bytes);
}
inline void asan_arrive(void* fake_stack, StackBounds* previous) {
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
  if (previous != nullptr) *previous = {static_cast<char*>(const_cast<void*>(bottom)), bytes};
}
inline void asan_forget(const StackBounds& stack) {
  __asan_unpoison_memory_region(stack.bottom, stack.bytes);
}
#else
inline void asan_forget(const StackBounds&) {}
inline void asan_leave(void**, const StackBounds&) {}
inline void asan_arrive(void*, StackBounds*) {}
#endif

}  // namespace sim
