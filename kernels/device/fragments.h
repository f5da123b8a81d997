// The fragment layouts of ldmatrix and mma.sync as the simulated device computes with them, from the PTX
// ISA's tables. ptx.h tells them in words; nvcc sees nothing of this.
#pragma once

#if !defined(__CUDACC__)

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace minillm::kernels {

/// What ldmatrix gives a lane of a matrix whose rows r are at row(8 · matrix + r).
template <bool kTransposed, class Row>
uint32_t matrix_word(const Row& row, int matrix, int lane) {
  const int line = lane / 4, first = lane % 4 * 2;
  uint16_t half[2];
  for (int h = 0; h < 2; ++h) {
    const int r = kTransposed ? first + h : line, column = kTransposed ? line : first + h;
    std::memcpy(&half[h], row(8 * matrix + r) + 2 * column, sizeof half[h]);
  }
  return half[0] | uint32_t{half[1]} << 16;
}

/// Where element i of a lane's D fragment is in [16, 8].
constexpr int result_row(int lane, int i) {
  return i / 2 * 8 + lane / 4;
}
constexpr int result_column(int lane, int i) {
  return lane % 4 * 2 + i % 2;
}

/// The A operand of 4 words of each lane.
SIM_INVISIBLE inline void unpack_rows(float (*a)[16], const uint32_t* const (&words)[32]) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      float* const to = &a[i % 2 * 8 + lane / 4][i / 2 * 8 + lane % 4 * 2];
      to[0] = __builtin_bit_cast(float, words[lane][i] << 16);
      to[1] = __builtin_bit_cast(float, words[lane][i] & 0xffff0000u);
    }
}

/// kTiles B operands side by side, of 2 · kTiles words of each lane.
template <int kTiles>
SIM_INVISIBLE void unpack_columns(float (*b)[8 * kTiles], const uint32_t* const (&words)[32]) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int k = i % 2 * 8 + lane % 4 * 2, column = i / 2 * 8 + lane / 4;
      b[k][column] = __builtin_bit_cast(float, words[lane][i] << 16);
      b[k + 1][column] = __builtin_bit_cast(float, words[lane][i] & 0xffff0000u);
    }
}

/// d = a · b, or d += the same sum of 16 products with kAdd.
template <int kTiles, bool kAdd>
SIM_INVISIBLE void multiply(float (*d)[8 * kTiles], const float (*a)[16], const float (*b)[8 * kTiles]) {
  using Four = float __attribute__((vector_size(16), may_alias));  // g++ does not find the vectors by itself
  for (int i = 0; i < 16; ++i) {
    Four sum[2 * kTiles] = {};
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 2 * kTiles; ++j) sum[j] += a[i][k] * reinterpret_cast<const Four*>(b[k])[j];
    Four* const row = reinterpret_cast<Four*>(d[i]);
    for (int j = 0; j < 2 * kTiles; ++j) row[j] = kAdd ? row[j] + sum[j] : sum[j];
  }
}

}  // namespace minillm::kernels

#endif
