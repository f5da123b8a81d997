// Kernels on the CPU: a block runs on one OS thread, every CUDA thread of it is a fiber.
//
// Goals: the very kernels that run on the GPU run here, with an error (kernel, block, threads) for what would
// hang or be undefined there, and with exactly CUDA's ordering visible to ThreadSanitizer. Non-goals: speed
// beyond small models; warps in lock step (lanes meet only at collectives); kernels whose blocks or threads
// spin on memory written by others: a fiber yields only at barriers and warp collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "sim/driver_types.h"
#include "sim/sanitizer.h"
#include "sim/vector_types.h"

// Of the CUDA thread that runs; meaningful inside kernels only.
extern constinit thread_local uint3 threadIdx;
extern constinit thread_local uint3 blockIdx;
extern constinit thread_local dim3 blockDim;
extern constinit thread_local dim3 gridDim;
inline constexpr int warpSize = 32;

namespace sim {

/// Enqueues `body` to run once per CUDA thread. cudaErrorInvalidConfiguration when grid, block or shared
/// memory exceed the device's limits (1024 threads, block.z 64, grid y and z 65535, 227 KiB),
/// cudaErrorInvalidResourceHandle for a stream that does not exist. `name` is copied.
cudaError_t launch(const char* name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   std::function<void()> body);

/// Identity of one object in static shared memory, one per OS thread. Holds where the running block has it.
struct SharedSlot {
  void* storage = nullptr;
  uint64_t block = 0;
};
/// The running block's storage for `slot`: 128-byte aligned, its ends guarded by AddressSanitizer, 0xFF at
/// first use.
void* static_shared(SharedSlot& slot, size_t bytes);
/// The running block's dynamic shared memory: the size given at launch, otherwise as static_shared.
void* dynamic_shared();

// What the intrinsics of device_functions.h stand on. Lanes named by `mask` meet; a lane outside its mask, a
// mask that names lanes the block does not have, and lanes that meet in different operations are errors.
void sync_threads();
void sync_warp(uint32_t mask);
enum class Shuffle { kIndex, kUp, kDown, kXor };
/// The bits of the lane that `kind` and `operand` name within segments of `width` lanes; the caller's own
/// where CUDA says so; all ones where CUDA leaves the value undefined (a lane outside the mask).
uint64_t shuffle(Shuffle kind, uint32_t mask, uint64_t bits, int operand, int width);
/// Bit i: lane i is in the mask and its predicate holds. `name` is the intrinsic's, for errors.
uint32_t ballot(const char* name, uint32_t mask, bool predicate);
/// Lanes of the caller's warp that have not returned.
uint32_t active_lanes();
/// What all 32 lanes of the warp bring, in lane order: valid until the caller's next meeting with them.
/// Orders no memory. A block whose warp has fewer than 32 threads is an error, as in the collectives below.
const uint64_t* lane_values(const char* name, uint64_t value);
/// The row of a matrix at the address that a lane gave; misaligned to 16 bytes it is an error.
[[noreturn]] void fail_matrix_row(uint64_t address);
inline const std::byte* matrix_row(uint64_t address) {
  if (address % 16 != 0) fail_matrix_row(address);
  return reinterpret_cast<const std::byte*>(address);
}
/// Runs `compute` once for the warp, on what each lane brings, in lane order: it reads and writes that in
/// place. Orders no memory. The calls of a warp name the same function.
using WarpFunction = void (*)(void* const* lanes);
void warp_compute(const char* name, WarpFunction compute, void* lane);
/// Whether what a warp does in several meetings may be done in one: where threads take turns in forward
/// order and no ThreadSanitizer looks on. Elsewhere each instruction of the kernel is a meeting.
bool meets_at_once();

/// cp.async and its groups, of the calling thread: see async_copy.h.
void async_copy(void* to, const void* from, size_t bytes, bool exists);
void async_commit();
void async_wait(unsigned pending);

/// Orders the caller's earlier writes before its later atomics, as seen by threads that read those atomics.
void thread_fence();
/// Whether the caller has called thread_fence(): its atomics then order memory.
bool has_fenced();

}  // namespace sim
