// Matrix products by cuBLASLt, spoken of in row-major terms.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::cuda {

/// D[m,n] = op(A)[m,k] · op(B)[k,n] + beta · C[m,n] + bias[n], all row-major and dense, fp32 accumulation,
/// rounded once to the output type.
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
Cost gemm_cost(const Gemm& gemm);

/// A cuBLASLt handle with its workspace and the algorithm chosen per shape (first heuristic result; kept, so
/// that equal shapes give equal bits). For one stream at a time: the workspace is shared by all calls.
class BlasLt {
 public:
  /// `workspace`: device memory that outlives this object, 256-byte aligned; workspace_bytes() long.
  explicit BlasLt(void* workspace);
  ~BlasLt();
  BlasLt(const BlasLt&) = delete;
  BlasLt& operator=(const BlasLt&) = delete;

  static constexpr int64_t workspace_bytes() { return int64_t{32} << 20; }

  /// An empty product (m, n or k of 0) is an InternalError. Throws DeviceError with shape and cuBLAS status
  /// when cuBLASLt has no algorithm or fails.
  void run(const Gemm& gemm, cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace minillm::cuda
