// Column sums: the gradient of a bias. Adding the bias itself is an epilogue of the GEMM (cuda/gemm.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

struct BiasGradient {
  float* dbias = nullptr;    ///< [columns] fp32, written: sum over rows in a fixed order; no aliasing
  const void* dy = nullptr;  ///< [rows, columns] dtype
  float* scratch = nullptr;  ///< bias_gradient_scratch() bytes, any contents
  int64_t rows = 0;
  int columns = 0;
  DType dtype = DType::kBf16;
  bool accumulate = false;  ///< dbias += the finished sum, one fp32 addition, instead of =
};
/// Throws DeviceError when the launch fails.
void bias_gradient(const BiasGradient& a, cudaStream_t stream);
int64_t bias_gradient_scratch(int64_t rows, int columns);
Cost bias_gradient_cost(int64_t rows, int columns, DType dtype, bool accumulate = false);

}  // namespace minillm::kernels
