// What the cuBLASLt stand-in refuses: misuse that a GPU would answer with a crash, garbage or silence.
#include <cublasLt.h>
#include <gtest/gtest.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <string>
#include <vector>

#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "sim/control.h"

namespace minillm::cuda {
namespace {

/// D[4,3] = A[4,2] · B[2,3], column-major fp32, whose parts a test changes before run().
struct Problem {
  Problem() {
    EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
    layout(&la, CUDA_R_32F, 4, 2, 4);
    layout(&lb, CUDA_R_32F, 2, 3, 2);
    layout(&ld, CUDA_R_32F, 4, 3, 4);
    check(cudaMemset(memory.data(), 0, static_cast<size_t>(memory.bytes())));
    check(cudaStreamSynchronize(nullptr));  // `stream` does not wait for the default one
  }
  ~Problem() {
    for (const auto layout : {la, lb, ld})
      EXPECT_EQ(cublasLtMatrixLayoutDestroy(layout), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulPreferenceDestroy(preference), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescDestroy(operation), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtDestroy(handle), CUBLAS_STATUS_SUCCESS);
  }

  void layout(cublasLtMatrixLayout_t* out, cudaDataType type, uint64_t rows, uint64_t cols, int64_t leading) {
    if (*out) {
      EXPECT_EQ(cublasLtMatrixLayoutDestroy(*out), CUBLAS_STATUS_SUCCESS);
    }
    EXPECT_EQ(cublasLtMatrixLayoutCreate(out, type, rows, cols, leading), CUBLAS_STATUS_SUCCESS);
  }
  cublasStatus_t heuristic() {
    int found = 0;
    return cublasLtMatmulAlgoGetHeuristic(handle, operation, la, lb, ld, ld, preference, 1, &result, &found);
  }
  cublasStatus_t run(const cublasLtMatmulAlgo_t* algo = nullptr) {
    const float alpha = 1;
    return cublasLtMatmul(handle, operation, &alpha, a, la, b, lb, &beta, c, ld, d, ld, algo, nullptr, 0,
                          stream.get());
  }

  Stream stream;
  DeviceMemory memory{4096};
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  cublasLtMatrixLayout_t la = nullptr, lb = nullptr, ld = nullptr;
  cublasLtMatmulHeuristicResult_t result{};
  std::byte* a = memory.data();
  std::byte* b = memory.data() + 256;
  std::byte* c = memory.data() + 512;
  std::byte* d = memory.data() + 512;
  float beta = 0;
};

TEST(SimBlas, BiasRunsAlongTheRowsOfD) {
  Problem p;
  const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  const void* bias = p.memory.data() + 1024;
  const std::vector<float> values = {1, 2, 3, 4};
  check(cudaMemcpy(p.memory.data() + 1024, values.data(), 16, cudaMemcpyHostToDevice));
  ASSERT_EQ(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, 4),
            CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(p.run(), CUBLAS_STATUS_INVALID_VALUE) << "the bias pointer is not set";
  ASSERT_EQ(
      cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias),
      CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(p.run(), CUBLAS_STATUS_SUCCESS);
  p.stream.synchronize();
  std::vector<float> d(12);
  check(cudaMemcpy(d.data(), p.d, 48, cudaMemcpyDeviceToHost));
  EXPECT_EQ(d, (std::vector<float>{1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}));
}

TEST(SimBlas, RefusesShapesThatDoNotFit) {
  Problem p;
  p.layout(&p.la, CUDA_R_32F, 4, 2, 3);  // leading dimension below the rows
  EXPECT_EQ(p.run(), CUBLAS_STATUS_INVALID_VALUE);
  p.layout(&p.la, CUDA_R_32F, 4, 5, 4);  // k of A is not k of B
  EXPECT_EQ(p.run(), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(p.heuristic(), CUBLAS_STATUS_INVALID_VALUE);
  p.layout(&p.la, CUDA_R_32F, 2, 4, 2);
  const int32_t transposed = CUBLAS_OP_T;
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, 8),
            CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, 4),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(p.run(), CUBLAS_STATUS_SUCCESS);
  p.stream.synchronize();
}

TEST(SimBlas, RefusesTypesOutsideTheSubset) {
  Problem p;
  p.layout(&p.la, CUDA_R_16BF, 4, 2, 4);  // A and B differ
  EXPECT_EQ(p.heuristic(), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(p.run(), CUBLAS_STATUS_NOT_SUPPORTED);
  p.layout(&p.la, CUDA_R_32F, 4, 2, 4);
  p.layout(&p.ld, CUDA_R_16BF, 4, 3, 4);  // bf16 output of fp32 inputs
  EXPECT_EQ(p.run(), CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST(SimBlas, RefusesPointersThatTheAlgorithmWasNotChosenFor) {
  Problem p;
  ASSERT_EQ(p.heuristic(), CUBLAS_STATUS_SUCCESS);  // 256 bytes, the default
  EXPECT_EQ(p.run(&p.result.algo), CUBLAS_STATUS_SUCCESS);
  p.a += 4;
  EXPECT_EQ(p.run(&p.result.algo), CUBLAS_STATUS_NOT_SUPPORTED);
  const uint32_t alignment = 4;
  ASSERT_EQ(cublasLtMatmulPreferenceSetAttribute(p.preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                                 &alignment, sizeof alignment),
            CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(p.heuristic(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(p.run(&p.result.algo), CUBLAS_STATUS_SUCCESS);
  p.layout(&p.lb, CUDA_R_32F, 2, 3, 7);  // another problem than the heuristic's
  EXPECT_EQ(p.run(&p.result.algo), CUBLAS_STATUS_INVALID_VALUE);
  p.stream.synchronize();
}

TEST(SimBlas, RefusesOverlappingOperands) {
  Problem p;
  p.d = p.a;
  EXPECT_EQ(p.run(), CUBLAS_STATUS_INVALID_VALUE);
  p.d = p.c + 4;
  EXPECT_EQ(p.run(), CUBLAS_STATUS_SUCCESS) << "C is not used";
  p.beta = 1;
  EXPECT_EQ(p.run(), CUBLAS_STATUS_INVALID_VALUE);
  p.c = nullptr;
  EXPECT_EQ(p.run(), CUBLAS_STATUS_INVALID_VALUE);
  p.stream.synchronize();
}

TEST(SimBlas, AnOperandOutsideItsAllocationFailsTheStream) {
  Problem p;
  p.b = p.memory.data() + 4096 - 20;  // B needs 24 bytes
  ASSERT_EQ(p.run(), CUBLAS_STATUS_SUCCESS);
  EXPECT_NE(cudaStreamSynchronize(p.stream.get()), cudaSuccess);
  const std::string text = cudaGetErrorString(cudaGetLastError());
  EXPECT_NE(text.find("cublasLtMatmul: the 24 bytes of B do not lie within one allocation"),
            std::string::npos)
      << text;
  EXPECT_EQ(p.run(), CUBLAS_STATUS_EXECUTION_FAILED) << "the failure is not sticky";
  sim::clear_failure();
}

#if defined(__SANITIZE_ADDRESS__)
TEST(SimBlas, AddressSanitizerNamesThePoisonedOperand) {
  Problem p;
  __asan_poison_memory_region(p.a + 16, 8);
  ASSERT_EQ(p.run(), CUBLAS_STATUS_SUCCESS);
  EXPECT_NE(cudaStreamSynchronize(p.stream.get()), cudaSuccess);
  const std::string text = cudaGetErrorString(cudaGetLastError());
  EXPECT_NE(text.find("cublasLtMatmul reads A outside its memory, at byte 16 of 32"), std::string::npos)
      << text;
  __asan_unpoison_memory_region(p.a + 16, 8);
  sim::clear_failure();
}
#endif

}  // namespace
}  // namespace minillm::cuda
