// SwiGLU (Shazeer 2020): h = silu(gate) · up with gate and up side by side as one GEMM wrote them; fp32
// arithmetic rounded once. The backward pass recomputes the sigmoid.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

struct SwigluForward {
  void* h = nullptr;              ///< [rows, columns] dtype, written; no aliasing
  const void* gate_up = nullptr;  ///< [rows, 2 · columns] dtype: of each row the gate, then up
  int64_t rows = 0;
  int columns = 0;  ///< of h, below 2^30
  DType dtype = DType::kBf16;
};
/// Throws DeviceError when the launch fails.
void swiglu_forward(const SwigluForward& a, cudaStream_t stream);
Cost swiglu_forward_cost(int64_t rows, int columns, DType dtype);

struct SwigluBackward {
  void* dgate_up = nullptr;       ///< [rows, 2 · columns] dtype, written; may alias gate_up
  const void* dh = nullptr;       ///< [rows, columns] dtype
  const void* gate_up = nullptr;  ///< [rows, 2 · columns] dtype, the forward input
  /// [rows, columns] dtype, written: the forward output again, for the gradient of the weight that h was
  /// multiplied by, at a third of what another forward pass would move; may alias dh. nullptr: not wanted.
  void* h = nullptr;
  int64_t rows = 0;
  int columns = 0;
  DType dtype = DType::kBf16;
};
void swiglu_backward(const SwigluBackward& a, cudaStream_t stream);
Cost swiglu_backward_cost(int64_t rows, int columns, DType dtype, bool with_h = false);

}  // namespace minillm::kernels
