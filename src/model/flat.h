// Addresses inside flat buffers, for the passes of the model.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "shard/program.h"

namespace minillm::model {

/// The buffer with this index, as T.
template <class T = void>
T* buffer(const shard::Operands& o, int index) {
  return static_cast<T*>(static_cast<void*>(o.buffers[index]));
}

/// The tensor that starts at element `offset` of the unit's weights.
inline const void* weight(const shard::Operands& o, int64_t offset, DType dtype) {
  return o.weights + offset * size_of(dtype);
}

/// Row `row` of a matrix with `columns` columns.
inline std::byte* row_of(void* matrix, int64_t row, int64_t columns, DType dtype) {
  return static_cast<std::byte*>(matrix) + row * columns * size_of(dtype);
}

}  // namespace minillm::model
