// Token embedding: a row of the table per token, and the gradient of the table as an ordered sum per token
// id.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

struct EmbeddingForward {
  void* out = nullptr;              ///< [tokens, columns] dtype, written; no aliasing
  const void* table = nullptr;      ///< [vocabulary, columns] dtype
  const int32_t* tokens = nullptr;  ///< [tokens], each in [0, vocabulary): checked where data enters
  int64_t count = 0;                ///< number of tokens
  int columns = 0;                  ///< below 2^30
  DType dtype = DType::kBf16;
};
/// Throws DeviceError when the launch fails.
void embedding_forward(const EmbeddingForward& a, cudaStream_t stream);
Cost embedding_forward_cost(int64_t count, int columns, DType dtype);

struct EmbeddingBackward {
  float* dtable = nullptr;          ///< [vocabulary, columns] fp32, written; no aliasing
  const void* dout = nullptr;       ///< [tokens, columns] dtype
  const int32_t* tokens = nullptr;  ///< [tokens], each in [0, vocabulary)
  void* scratch = nullptr;          ///< embedding_backward_scratch() bytes, 16-byte aligned, any contents
  int64_t count = 0;                ///< number of tokens, below 2^31
  int64_t vocabulary = 0;           ///< below 2^31
  int columns = 0;
  DType dtype = DType::kBf16;
  /// false: dtable is written whole, with zeros in the rows of tokens that do not occur. true: each token's
  /// finished sum is added to its row, one fp32 addition, and rows of tokens that do not occur are left
  /// alone.
  bool accumulate = false;
};
/// Sorts the positions by token id (stable), then adds each token's rows in position order in fp32. Of a
/// token with 128 occurrences or more, each 64 are added to a partial sum of their own, and these in order,
/// before the occurrences that are left: a frequent token is work for the whole GPU, and its sum as exact as
/// a rare one's.
void embedding_backward(const EmbeddingBackward& a, cudaStream_t stream);
/// `columns`: those of the call, or more.
int64_t embedding_backward_scratch(int64_t count, int64_t vocabulary, int columns);
/// Accumulating, the rows that are read and written are counted as if all tokens were distinct.
Cost embedding_backward_cost(int64_t count, int64_t vocabulary, int columns, DType dtype,
                             bool accumulate = false);

}  // namespace minillm::kernels
