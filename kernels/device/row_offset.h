// Where a row of a tensor starts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace minillm::kernels {

/// Elements before `row` of a tensor whose rows are `columns` long; it may exceed 2^31.
__host__ __device__ constexpr int64_t row_offset(int64_t row, int columns) {
  return row * columns;
}

}  // namespace minillm::kernels
