// Rotary position encoding (Su et al. 2021), rotate-half convention: element i of a head is paired with
// element i + head_size/2 and the pair is turned by position · theta^(-2i/head_size). Works in place on the q
// and k heads of the packed tensor that attention reads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

/// The table [sequence, head_size/2] of (cos, sin), angles computed in double (bf16 or fp32 angles are wrong
/// by whole turns at long positions). `head_size` is even.
std::vector<float2> rope_table(int sequence, int head_size, double theta);

struct Rope {
  /// [batch, sequence, heads + 2 · kv_heads, head_size] dtype: of each position the heads of q, of k, of v; q
  /// and k rewritten in place.
  void* qkv = nullptr;
  const float2* table = nullptr;  ///< rope_table() on the device
  int64_t batch = 0;              ///< batch · sequence is below 2^31
  int sequence = 0;
  int heads = 0;         ///< of q
  int head_size = 0;     ///< even
  bool inverse = false;  ///< turn back: the backward pass, on d(qkv)
  DType dtype = DType::kBf16;
  int kv_heads = 0;  ///< of k and of v each; 0: as many as q has
};
/// Throws DeviceError when the launch fails, InternalError when there are too many positions.
void rope(const Rope& a, cudaStream_t stream);
Cost rope_cost(int64_t batch, int sequence, int heads, int head_size, DType dtype, int kv_heads = 0);

}  // namespace minillm::kernels
