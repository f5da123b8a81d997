// Softmax cross-entropy of logits against target ids: loss per row, and the gradient written over the logits.
//   loss[r] = logsumexp(logits[r,:]) - logits[r,target]
//   dlogits[r,c] = (softmax(logits[r,:])[c] - [c == target]) · scale
// Rows whose target is kIgnoreTarget have loss 0 and gradient 0. fp32 arithmetic; the target's gradient is
// formed from the fp32 logit and rounded once. A NaN or +inf logit makes the row's loss and gradient NaN;
// -inf logits have probability 0, and a row of nothing else is NaN. A target outside [0, vocabulary) that is
// not kIgnoreTarget makes loss and gradient NaN.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::kernels {

/// The target of a position that does not count, as in PyTorch.
inline constexpr int32_t kIgnoreTarget = -100;

struct CrossEntropy {
  void* logits = nullptr;            ///< [rows, vocabulary] dtype; read, then overwritten with the gradient
  float* loss = nullptr;             ///< [rows] fp32, written, not scaled
  const int32_t* targets = nullptr;  ///< [rows]
  const float* scale = nullptr;      ///< one device scalar, usually 1 / number of valid targets on all ranks
  int64_t rows = 0;
  int vocabulary = 0;
  DType dtype = DType::kBf16;
};
/// Throws DeviceError when the launch fails.
void cross_entropy(const CrossEntropy& a, cudaStream_t stream);
Cost cross_entropy_cost(int64_t rows, int vocabulary, DType dtype);

/// count[0] = number of targets that are not kIgnoreTarget, as fp32 (exact below 2^24).
void count_valid_targets(float* count, const int32_t* targets, int64_t rows, cudaStream_t stream);

/// scale[0] = 1 / max(count[0], 1).
void reciprocal_of_count(float* scale, const float* count, cudaStream_t stream);

}  // namespace minillm::kernels
