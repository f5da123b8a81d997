// Shared memory of a block. Kernels use these two functions and never `__shared__` itself, so that the
// simulated device can give every block fresh, poisoned and bounds-checked memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace minillm::kernels {

/// One T per block in static shared memory, uninitialised. All calls with the same T in a kernel name the
/// same object, so give each kernel a struct of its own that holds all its arrays. T is trivially
/// constructible.
template <class T>
__device__ T& shared() {
#if defined(__CUDACC__)
  __shared__ alignas(alignof(T) < 16 ? 16 : alignof(T)) unsigned char bytes[sizeof(T)];
  return *reinterpret_cast<T*>(bytes);
#else
  static thread_local sim::SharedSlot slot;  // its address is the identity of T's storage
  return *static_cast<T*>(sim::static_shared(slot, sizeof(T)));
#endif
}

/// The dynamic shared memory given at launch, 16-byte aligned.
template <class T>
__device__ T* dynamic_shared() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
#else
  return static_cast<T*>(sim::dynamic_shared());
#endif
}

}  // namespace minillm::kernels
