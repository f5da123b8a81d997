#include "cuda/gemm_plan.h"

#include <algorithm>

#include "core/checked.h"
#include "core/error.h"

namespace minillm::cuda {
namespace {

using Preference = BlasOwner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType_t cuda_type(DType type) {
  return type == DType::kFp32 ? CUDA_R_32F : CUDA_R_16BF;
}

/// Where k is split, partial sums have to stay fp32: of the ways to add them up, "in place" and "output type"
/// keep them in the output's type. All ways have an order that timing does not change ("in place" by
/// counters).
uint32_t reduction_schemes(DType output) {
  return output == DType::kFp32 ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

}  // namespace

std::string describe(cublasStatus_t status) {
  return std::string(cublasLtGetStatusName(status)) + ": " + cublasLtGetStatusString(status);
}

void check(cublasStatus_t status, const char* call, const GemmKey& key) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw DeviceError(describe(key) + ": " + call + ": " + describe(status));
}

GemmPlan::GemmPlan(cublasLtHandle_t handle, const GemmKey& key, const std::byte* memory)
    : handle_(handle), key_(key) {
  describe_operation(memory);
  describe_matrices();
}

template <class T>
void GemmPlan::set(cublasLtMatmulDescAttributes_t attribute, T value) {
  check(cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof value),
        "cublasLtMatmulDescSetAttribute", key_);
}

void GemmPlan::describe_operation(const std::byte* memory) {
  check(cublasLtMatmulDescCreate(operation_.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescCreate", key_);
  set<int32_t>(CUBLASLT_MATMUL_DESC_TRANSA, key_.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set<int32_t>(CUBLASLT_MATMUL_DESC_TRANSB, key_.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  // 0 means all multiprocessors to some versions and none to others.
  if (key_.sm_limit > 0) set<int32_t>(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, key_.sm_limit);
  if (!key_.bias) return;
  set<uint32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  set<int32_t>(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(key_.output));
  const std::byte* aligned_as_the_bias = memory + key_.align_bias % 256;
  set<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER, aligned_as_the_bias);
}

void GemmPlan::describe_matrices() {
  const auto create = [this](Layout& layout, DType type, int64_t rows, int64_t cols) {
    check(cublasLtMatrixLayoutCreate(layout.out(), cuda_type(type), narrow<uint64_t>(rows),
                                     narrow<uint64_t>(cols), rows),
          "cublasLtMatrixLayoutCreate", key_);
  };
  create(a_, key_.input, key_.transpose_a ? key_.m : key_.k, key_.transpose_a ? key_.k : key_.m);
  create(b_, key_.input, key_.transpose_b ? key_.k : key_.n, key_.transpose_b ? key_.n : key_.k);
  create(d_, key_.output, key_.n, key_.m);
}

std::vector<cublasLtMatmulAlgo_t> GemmPlan::candidates(int most) const {
  Preference preference;
  check(cublasLtMatmulPreferenceCreate(preference.out()), "cublasLtMatmulPreferenceCreate", key_);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute", key_);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(BlasLt::workspace_bytes()));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key_.align_b);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key_.align_a);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key_.align_c);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key_.align_d);
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction_schemes(key_.output));
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
  int found = 0;
  constexpr const char* kCall = "no algorithm: cublasLtMatmulAlgoGetHeuristic";
  check(cublasLtMatmulAlgoGetHeuristic(handle_, operation_.get(), b_.get(), a_.get(), d_.get(), d_.get(),
                                       preference.get(), most, results.data(), &found),
        kCall, key_);
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < found; ++i)
    if (results[static_cast<size_t>(i)].state == CUBLAS_STATUS_SUCCESS)
      algorithms.push_back(results[static_cast<size_t>(i)].algo);
  if (algorithms.empty()) check(found > 0 ? results[0].state : CUBLAS_STATUS_NOT_SUPPORTED, kCall, key_);
  return algorithms;
}

std::optional<std::string> GemmPlan::refusal(const cublasLtMatmulAlgo_t& algorithm) const {
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(handle_, operation_.get(), b_.get(), a_.get(),
                                                        d_.get(), d_.get(), &algorithm, &result);
  if (status != CUBLAS_STATUS_SUCCESS) return "cublasLtMatmulAlgoCheck: " + describe(status);
  if (result.workspaceSize > static_cast<size_t>(BlasLt::workspace_bytes()))
    return "it needs a workspace of " + std::to_string(result.workspaceSize) + " bytes; there are " +
           std::to_string(BlasLt::workspace_bytes());
  // Only the heuristic heeds the preference; an algorithm may come from a file.
  uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
  size_t written = 0;
  check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
                                             sizeof scheme, &written),
        "cublasLtMatmulAlgoConfigGetAttribute", key_);
  if ((scheme & ~reduction_schemes(key_.output)) != 0)
    return "its reduction scheme, " + std::to_string(scheme) + ", rounds partial sums to " +
           std::string(name_of(key_.output));
  return std::nullopt;
}

cublasStatus_t GemmPlan::launch(const cublasLtMatmulAlgo_t& algorithm, const Gemm& g, void* workspace,
                                cudaStream_t stream) {
  if (g.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
  const float alpha = 1;
  return cublasLtMatmul(handle_, operation_.get(), &alpha, g.b, b_.get(), g.a, a_.get(), &g.beta,
                        c_operand(g), d_.get(), g.d, d_.get(), &algorithm, workspace,
                        static_cast<size_t>(BlasLt::workspace_bytes()), stream);
}

}  // namespace minillm::cuda
