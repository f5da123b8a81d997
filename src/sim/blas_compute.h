// The arithmetic behind the cuBLASLt stand-in.
#pragma once

#include <library_types.h>

#include <cstdint>

namespace sim {

/// A column-major matrix in device memory; element (i, j) is data[i + j * ld].
struct BlasMatrix {
  const char* name;  ///< for errors: "A", "B", "C", "D"
  void* data;
  cudaDataType type;
  int64_t rows, cols, ld;
};

struct BlasProblem {
  BlasMatrix a, b, c, d;
  bool transpose_a, transpose_b;
  float alpha, beta;
  const void* bias;         ///< d.rows values of d's type, or null
  int parts;                ///< k is added up in so many pieces, one after the other
  bool sum_in_output_type;  ///< the sum is rounded to d's type after each piece
};

constexpr int64_t blas_element_size(cudaDataType type) {
  return type == CUDA_R_32F ? 4 : 2;
}

/// D = alpha · op(A) · op(B) + beta · C + bias, now, on the calling thread. C is not read when beta is 0.
/// Under AddressSanitizer an operand that touches memory it may not is a std::runtime_error naming the
/// operand.
void compute_matmul(const BlasProblem& problem);

}  // namespace sim
