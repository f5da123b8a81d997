// Root-mean-square normalisation over the last dimension (Zhang & Sennrich 2019).
//   rstd[r] = 1 / sqrt(mean_c(x[r,c]²) + epsilon),   y[r,c] = x[r,c] · rstd[r] · weight[c]
// All arithmetic in fp32, rounded once when y or dx is stored; y is (x · rstd) · weight, in this order.
//
// Tensors may start at any element; full speed needs 16-byte alignment of all of them and of their rows. The
// costs' `extra_bytes` are those of aligned tensors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

struct RmsNormForward {
  void* y = nullptr;             ///< [rows, columns] dtype, written; may alias x
  float* rstd = nullptr;         ///< [rows], written
  const void* x = nullptr;       ///< [rows, columns] dtype
  const void* weight = nullptr;  ///< [columns] dtype
  int64_t rows = 0;
  int columns = 0;
  float epsilon = 0;
  DType dtype = DType::kBf16;
};
/// Throws DeviceError when the launch fails.
void rmsnorm_forward(const RmsNormForward& a, cudaStream_t stream);
Cost rmsnorm_forward_cost(int64_t rows, int columns, DType dtype);

/// The norm of a sum of two tensors, in one pass over them, for where the product before it cannot add the
/// residual. The sum is rounded to dtype before it is normalised: rmsnorm_recompute and rmsnorm_backward,
/// given the stored sum as x, see the numbers that the forward pass saw.
struct RmsNormResidualForward {
  void* sum = nullptr;             ///< [rows, columns] dtype, written: x + residual; may alias x or residual
  void* y = nullptr;               ///< [rows, columns] dtype, written: the norm of sum; not over sum
  float* rstd = nullptr;           ///< [rows], written
  const void* x = nullptr;         ///< [rows, columns] dtype
  const void* residual = nullptr;  ///< [rows, columns] dtype
  const void* weight = nullptr;    ///< [columns] dtype
  int64_t rows = 0;
  int columns = 0;
  float epsilon = 0;
  DType dtype = DType::kBf16;
};
void rmsnorm_residual_forward(const RmsNormResidualForward& a, cudaStream_t stream);
Cost rmsnorm_residual_forward_cost(int64_t rows, int columns, DType dtype);

/// y again from the saved rstd: bitwise what rmsnorm_forward wrote.
struct RmsNormRecompute {
  void* y = nullptr;             ///< [rows, columns] dtype, written; may alias x
  const float* rstd = nullptr;   ///< [rows]
  const void* x = nullptr;       ///< [rows, columns] dtype
  const void* weight = nullptr;  ///< [columns] dtype
  int64_t rows = 0;
  int columns = 0;
  DType dtype = DType::kBf16;
};
void rmsnorm_recompute(const RmsNormRecompute& a, cudaStream_t stream);
Cost rmsnorm_recompute_cost(int64_t rows, int columns, DType dtype);

struct RmsNormBackward {
  /// [rows, columns] dtype, written: over dy, over residual, or in a buffer of its own, which leaves all
  /// inputs as they are. Bitwise the same in each case.
  void* dx = nullptr;
  float* dweight = nullptr;        ///< [columns] fp32, written: sum over rows, in a fixed order; no aliasing
  const void* dy = nullptr;        ///< [rows, columns] dtype
  const void* x = nullptr;         ///< [rows, columns] dtype
  const void* weight = nullptr;    ///< [columns] dtype
  const float* rstd = nullptr;     ///< [rows], as saved by the forward pass
  const void* residual = nullptr;  ///< optional [rows, columns] dtype, added to dx before it is rounded
  float* scratch = nullptr;        ///< rmsnorm_backward_scratch() bytes, any contents
  int64_t rows = 0;
  int columns = 0;
  DType dtype = DType::kBf16;
  bool accumulate = false;  ///< dweight += the finished sum, one fp32 addition, instead of =
};
void rmsnorm_backward(const RmsNormBackward& a, cudaStream_t stream);
int64_t rmsnorm_backward_scratch(int64_t rows, int columns);
Cost rmsnorm_backward_cost(int64_t rows, int columns, bool residual, DType dtype, bool accumulate = false);

}  // namespace minillm::kernels
