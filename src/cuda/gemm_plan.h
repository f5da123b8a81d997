// Internal to BlasLt: a shape's cuBLASLt descriptors, and calls that take them.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/gemm.h"

namespace minillm::cuda {

template <class Handle, cublasStatus_t (*destroy)(Handle)>
class BlasOwner {
 public:
  BlasOwner() = default;
  ~BlasOwner() {
    if (handle_) (void)destroy(handle_);
  }
  BlasOwner(const BlasOwner&) = delete;
  BlasOwner& operator=(const BlasOwner&) = delete;
  Handle* out() { return &handle_; }
  Handle get() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};
using LtHandle = BlasOwner<cublasLtHandle_t, cublasLtDestroy>;

/// "CUBLAS_STATUS_NOT_SUPPORTED: …".
std::string describe(cublasStatus_t status);
/// Throws DeviceError naming shape, call and status unless it is success.
void check(cublasStatus_t status, const char* call, const GemmKey& key);

/// cuBLASLt is column-major, and a row-major matrix is its own transpose there: so D transposed = op(B)
/// transposed * op(A) transposed is computed, with B as cuBLASLt's first operand. Its bias runs along the
/// rows of the transposed D: our n.
class GemmPlan {
 public:
  /// `memory`: device memory, 256-byte aligned. Its address stands for the bias until launch().
  GemmPlan(cublasLtHandle_t handle, const GemmKey& key, const std::byte* memory);

  /// The heuristic's candidates, best first, at least one and at most `most`.
  std::vector<cublasLtMatmulAlgo_t> candidates(int most) const;
  /// Why cuBLASLt cannot run the algorithm for this shape, if it cannot.
  std::optional<std::string> refusal(const cublasLtMatmulAlgo_t& algorithm) const;
  /// Enqueues `gemm`, whose key is this plan's.
  cublasStatus_t launch(const cublasLtMatmulAlgo_t& algorithm, const Gemm& gemm, void* workspace,
                        cudaStream_t stream);

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value);
  void describe_operation(const std::byte* memory);
  void describe_matrices();

  using Descriptor = BlasOwner<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
  using Layout = BlasOwner<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
  cublasLtHandle_t handle_;
  GemmKey key_;
  Descriptor operation_;
  Layout a_, b_, d_;  ///< D's serves C, too
};

/// C is not read when beta is 0, but cuBLASLt wants a valid matrix: D itself.
inline const void* c_operand(const Gemm& gemm) {
  return gemm.beta != 0 ? gemm.c : gemm.d;
}

/// BlasLt::tune() but for remembering the choice.
GemmChoice time_candidates(GemmPlan& plan, const GemmKey& key, std::span<std::byte> scratch,
                           cudaStream_t stream);

}  // namespace minillm::cuda
