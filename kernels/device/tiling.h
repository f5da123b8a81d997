// Which elements a thread of a streaming kernel works on: arithmetic only, so that the host can evaluate it
// for tensors far larger than any test could allocate.
//
// Positions in a tensor are 64 bits wide. Within a block's tile they are 32 bits, where division is cheap.
#pragma once

#include <bit>
#include <cstdint>

#include "core/checked.h"

namespace minillm::kernels {

/// Exact division of integers below 2^31 by a divisor that is known at launch: a multiplication and a shift.
class Divisor {
 public:
  /// `divisor` is in [1, 2^31).
  constexpr explicit Divisor(uint32_t divisor)
      : divisor_(divisor),
        shift_(31 + std::bit_width(divisor - 1)),
        multiplier_(static_cast<uint32_t>((uint64_t{1} << shift_) / divisor + 1)) {}

  constexpr uint32_t value() const { return divisor_; }
  constexpr uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(uint64_t{n} * multiplier_ >> shift_);
  }

 private:
  uint32_t divisor_;
  int shift_;
  uint32_t multiplier_;
};

/// First element of vector k of a thread in a flat array. A block covers `vectors` runs of threads · width
/// adjacent elements, so that each access of a warp is contiguous.
constexpr int64_t first_element(int64_t block, uint32_t thread, uint32_t threads, int k, int vectors,
                                int width) {
  return ((block * vectors + k) * threads + thread) * width;
}

/// A vector of a matrix whose rows are cut into vectors.
struct RowVector {
  int64_t row;
  uint32_t vector;  ///< of the row
};

/// Vector number `index` of the matrix.
constexpr RowVector row_vector(int64_t index, const Divisor& vectors_per_row) {
  const uint64_t i = static_cast<uint64_t>(index), per_row = vectors_per_row.value();
  return {static_cast<int64_t>(i / per_row), static_cast<uint32_t>(i % per_row)};
}

/// The vector `offset` after `origin`; offset + vectors per row is below 2^31.
constexpr RowVector row_vector_after(const RowVector& origin, uint32_t offset,
                                     const Divisor& vectors_per_row) {
  const uint32_t at = origin.vector + offset, rows = vectors_per_row.quotient(at);
  return {origin.row + rows, at - rows * vectors_per_row.value()};
}

/// Blocks that cover `items` with `per_block` each. Throws InternalError beyond the largest grid, 2^31 - 1.
constexpr unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>(narrow<int32_t>(ceil_div(items, per_block)));
}

}  // namespace minillm::kernels
