// Kernels that do nothing but one of the instructions of kernels/device/ptx.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace minillm::kernels::testing {

/// How an operand comes into registers.
enum class Load { kOne, kTwo, kFour };

/// d [16, 8] fp32 = a [16, 16] · b, both bf16; b is [8, 16] (a row per column of the product), or [16, 8]
/// when `b_by_rows`, which needs transposed loads. One warp; operands go through shared memory.
void warp_product(float* d, const void* a, const void* b, bool b_by_rows, Load load);

/// d [16, 8] fp32 = bf16(a · b) · c, where b [16, 16] is stored as [n, k] and c [16, 8] as [k, n]: the
/// product's fragments are the next one's operand.
void chained_product(float* d, const void* a, const void* b, const void* c);

/// out[i] = the 16-byte words of in[i] for each `exists[i]`, else 0: `words` (a multiple of 32) words travel
/// through `stages` buffers in shared memory, copied ahead of their use. stages is 2 or 3.
void copy_through_stages(uint4* out, const uint4* in, const bool* exists, int words, int stages);

/// A copy to or from an address `offset` bytes past a multiple of 16.
void copy_misaligned(uint4* out, const unsigned char* in, int offset);
/// `groups` groups under way at once.
void copy_in_groups(uint4* out, const uint4* in, int groups);

void exponentials(float* out, const float* in, int count);

/// Copies `count` elements of 2 bytes with streaming accesses of 2, 4, 8 or 16 bytes.
void stream_elements(void* out, const void* in, int count, int bytes);

}  // namespace minillm::kernels::testing
