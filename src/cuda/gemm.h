// Matrix products by cuBLASLt, spoken of in row-major terms.
//
// Goals: equal bits for equal shapes, and the fastest algorithm where that is wanted. An algorithm is chosen
// once per shape, either by cuBLASLt's heuristic alone (its first candidate: nothing is measured, so that
// bits do not depend on timing) or by tune(). run() itself never measures, blocks or allocates device memory:
// once every shape has been run, it may be captured into a CUDA graph. Non-goals: batched and strided
// products, FP8.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/cost.h"
#include "core/dtype.h"
#include "cuda/gemm_choice.h"

namespace minillm::cuda {

/// D[m,n] = op(A)[m,k] · op(B)[k,n] + beta · C[m,n] + bias[n], all row-major and dense, fp32 accumulation,
/// rounded once to the output type, also by algorithms that split k. A gradient that is summed over several
/// products (beta 1, C = D) wants fp32 output: a bf16 sum loses what is below 1/256 of it.
struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;  ///< [m,k] input type, or [k,m] when transpose_a
  bool transpose_a = false;
  const void* b = nullptr;  ///< [k,n] input type, or [n,k] when transpose_b
  bool transpose_b = false;
  void* d = nullptr;        ///< [m,n] output type, written
  const void* c = nullptr;  ///< [m,n] output type, may alias d; used when beta is not 0
  float beta = 0;
  const void* bias = nullptr;  ///< optional [n] output type
  DType input = DType::kBf16;
  DType output = DType::kBf16;
};

/// Each operand moved once, C only when beta is not 0; 2·m·n·k flops. What algorithms move beyond that
/// (split-K partial sums in the workspace, operands that fall out of the cache between tiles) is theirs and
/// not counted.
Cost gemm_cost(const Gemm& gemm);

/// A cuBLASLt handle with its workspace and the algorithm of each shape. For one stream at a time: the
/// workspace is shared by all calls.
class BlasLt {
 public:
  /// `workspace`: device memory that outlives this object, 256-byte aligned; workspace_bytes() long.
  /// `sm_limit`: products are planned for so many multiprocessors, so that collectives on the others do not
  /// force a second wave; 0, or as many as there are and more: for all, and cuBLASLt is not told anything.
  explicit BlasLt(void* workspace, int64_t sm_limit = 0);
  ~BlasLt();
  BlasLt(const BlasLt&) = delete;
  BlasLt& operator=(const BlasLt&) = delete;

  static constexpr int64_t workspace_bytes() { return int64_t{32} << 20; }

  /// Uses the algorithm that tune() or adopt() set for the shape, else the heuristic's first.
  /// An empty product (m, n or k of 0) is an InternalError. Throws DeviceError with shape and cuBLAS status
  /// when cuBLASLt has no algorithm or fails.
  void run(const Gemm& gemm, cudaStream_t stream);

  /// The shapes of all calls so far, in the order of their first.
  const std::vector<GemmKey>& shapes() const;

  /// Times the heuristic's first kMostCandidates on operands that are in no cache, takes the one with the
  /// smallest median, and uses it from then on; another than the first has to be 2 % faster, which noise is
  /// not. Blocks until `stream` is idle; wants the device to itself. A shape that has a choice already is not
  /// timed.
  ///
  /// Operands, workspace and partial results lie in `scratch` (device memory, 256-byte aligned, overwritten,
  /// tune_bytes() or more, better several times the L2 cache): no operand of a real product is touched, so
  /// sums under way are not disturbed. Throws InternalError for too little scratch, DeviceError as run().
  GemmChoice tune(const GemmKey& key, std::span<std::byte> scratch, cudaStream_t stream);
  static constexpr int kMostCandidates = 16;
  static int64_t tune_bytes(const GemmKey& key);

  /// Uses a choice that was made elsewhere: before, or by another rank. Why cuBLASLt refuses it, if it does:
  /// the shape's algorithm is then unchanged.
  std::optional<std::string> adopt(const GemmKey& key, const GemmChoice& choice);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace minillm::cuda
