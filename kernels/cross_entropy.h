// Softmax cross-entropy of logits against target ids: loss per row, and the gradient written over the logits.
//   loss[r] = logsumexp(logits[r,:]) - logits[r,target]
//   dlogits[r,c] = (softmax(logits[r,:])[c] - [c == target]) · scale
// Rows whose target is kIgnoreTarget have loss 0 and gradient 0. fp32 arithmetic; the target's gradient is
// formed from the fp32 logit and rounded once. A NaN or +inf logit makes the row's loss and gradient NaN;
// -inf logits have probability 0, and a row of nothing else is NaN. A target outside [0, vocabulary) that is
// not kIgnoreTarget makes loss and gradient NaN. Probabilities below 2^-126 of the row's largest are 0.
//
// Rows may be padded, so that each starts on 16 bytes and the projections around this operation run at full
// speed: columns from `vocabulary` on take no part, whatever they hold, and their gradient is 0, also in rows
// that are NaN. Padding is for the GEMMs; this kernel is as fast on rows of any alignment.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

/// The target of a position that does not count, as in PyTorch.
inline constexpr int32_t kIgnoreTarget = -100;

struct CrossEntropy {
  void* logits = nullptr;            ///< [rows, columns] dtype; read, then overwritten with the gradient
  float* loss = nullptr;             ///< [rows] fp32, written, not scaled
  const int32_t* targets = nullptr;  ///< [rows]
  const float* scale = nullptr;      ///< one device scalar, usually 1 / number of valid targets on all ranks
  int64_t rows = 0;
  int vocabulary = 0;
  int columns = 0;  ///< of a row with its padding, at least vocabulary; 0: no padding
  DType dtype = DType::kBf16;
};
/// Throws UsageError when columns are fewer than the vocabulary, DeviceError when the launch fails.
void cross_entropy(const CrossEntropy& a, cudaStream_t stream);
/// `extra_bytes` is the part of rows too long for registers and shared memory (131072 bytes and 98304 bytes)
/// that is read twice, the second time as a rule from the L2 cache.
Cost cross_entropy_cost(int64_t rows, int vocabulary, DType dtype, int columns = 0);

/// count[0] = number of targets that are not kIgnoreTarget, counted exactly in 64 bits and rounded to fp32
/// once. `rows` is any number: those of all micro-batches of a step are counted in one call.
void count_valid_targets(float* count, const int32_t* targets, int64_t rows, cudaStream_t stream);

/// scale[0] = 1 / max(count[0], 1).
void reciprocal_of_count(float* scale, const float* count, cudaStream_t stream);

}  // namespace minillm::kernels
