// What the cuBLASLt stand-in refuses: misuse that a GPU would answer with a crash, garbage or silence. And
// what only it can show: which candidate BlasLt takes when it is known which is the fastest.
#include <cublasLt.h>
#include <gtest/gtest.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <bit>
#include <optional>
#include <string>
#include <vector>

#include "cuda/gemm_cache.h"
#include "gemm_fixture.h"
#include "sim/blas.h"
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

TEST(SimBlas, TheHeuristicOffersSplitSumsOnlyWhereAllowed) {
  Problem p;
  cublasLtMatmulHeuristicResult_t results[16];
  const auto offered = [&](int most) {
    int found = 0;
    EXPECT_EQ(cublasLtMatmulAlgoGetHeuristic(p.handle, p.operation, p.la, p.lb, p.ld, p.ld, p.preference,
                                             most, results, &found),
              CUBLAS_STATUS_SUCCESS);
    return found;
  };
  EXPECT_EQ(offered(16), sim::kBlasCandidates);
  EXPECT_EQ(offered(2), 2);
  const uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
  ASSERT_EQ(cublasLtMatmulPreferenceSetAttribute(p.preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                 &none, sizeof none),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(offered(16), 1);
}

TEST(SimBlas, ChecksThatAnAlgorithmFitsTheProblem) {
  Problem p;
  ASSERT_EQ(p.heuristic(), CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulHeuristicResult_t checked{};
  const auto check_algorithm = [&](const cublasLtMatmulAlgo_t& algorithm) {
    return cublasLtMatmulAlgoCheck(p.handle, p.operation, p.la, p.lb, p.ld, p.ld, &algorithm, &checked);
  };
  EXPECT_EQ(check_algorithm(p.result.algo), CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulAlgo_t damaged = p.result.algo;
  damaged.data[0] ^= 1;
  EXPECT_EQ(check_algorithm(damaged), CUBLAS_STATUS_INVALID_VALUE);
  damaged = p.result.algo;
  damaged.data[0] |= 0xffull << 32;  // a candidate that there is not
  EXPECT_EQ(check_algorithm(damaged), CUBLAS_STATUS_INVALID_VALUE);
  p.layout(&p.lb, CUDA_R_32F, 2, 3, 7);
  EXPECT_EQ(check_algorithm(p.result.algo), CUBLAS_STATUS_INVALID_VALUE);
}

TEST(SimBlas, Trap24_RefusesATargetOfNoMultiprocessorsAndOfTooMany) {
  Problem p;
  ASSERT_EQ(p.heuristic(), CUBLAS_STATUS_SUCCESS);
  const auto target = [&](int32_t count) {
    return cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &count,
                                          sizeof count);
  };
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  for (const int32_t count : {0, -1, multiprocessors + 1})
    EXPECT_EQ(target(count), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(target(multiprocessors), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(p.run(&p.result.algo), CUBLAS_STATUS_INVALID_VALUE) << "chosen for another target";
}

/// One shape of which the candidates' bits differ, run by a BlasLt; and which candidate is the fastest.
class FastestCandidate : public ::testing::Test {
 protected:
  explicit FastestCandidate(int64_t sm_limit = 0) : fixture_(sm_limit) { run(); }
  ~FastestCandidate() override { sim::set_blas_delays({}); }

 public:
  /// Far from each other, whatever else the machine does.
  static void set_fastest(int candidate) {
    std::array<std::chrono::microseconds, sim::kBlasCandidates> delays;
    delays.fill(std::chrono::milliseconds(10));
    delays[static_cast<size_t>(candidate)] = {};
    sim::set_blas_delays(delays);
  }

 protected:
  std::vector<std::byte> run() {
    fixture_.blas().run(fixture_.gemm(case_, a_, b_, d_, d_, d_), fixture_.stream().get());
    fixture_.stream().synchronize();
    return d_.download();
  }
  const GemmKey& key() { return fixture_.blas().shapes().at(0); }
  GemmChoice tune() {
    return fixture_.blas().tune(key(), {scratch_.data(), static_cast<size_t>(scratch_.bytes())},
                                fixture_.stream().get());
  }
  static std::array<int64_t, sim::kBlasCandidates> products() { return sim::blas_record().products; }

  Case case_{24, 40, 300, DType::kFp32, DType::kFp32, false, true};
  std::mt19937 random_{29};
  Operand a_{case_.input, 24 * 300, 0, random_}, b_{case_.input, 300 * 40, 0, random_};
  Operand d_{case_.output, 24 * 40, 0, random_};
  DeviceMemory scratch_{BlasLt::workspace_bytes() + (4 << 20)};
  Fixture fixture_;
};

TEST_F(FastestCandidate, IsChosenOnceAndUsed) {
  const std::vector<std::byte> first = run();
  set_fastest(2);
  const GemmChoice choice = tune();
  EXPECT_EQ(choice.candidate, 2);
  EXPECT_EQ(choice.candidates, sim::kBlasCandidates);
  EXPECT_GT(choice.first_seconds, 9e-3);
  EXPECT_LT(choice.seconds, choice.first_seconds);
  auto before = products();
  EXPECT_NE(run(), first) << "the candidates' bits do not differ";
  before[2] += 1;
  EXPECT_EQ(products(), before);
  set_fastest(1);
  EXPECT_EQ(tune().candidate, 2);
  EXPECT_EQ(products(), before) << "timed a second time";
}

TEST_F(FastestCandidate, DoesNotMatterWithoutTuning) {
  set_fastest(2);
  auto before = products();
  run();
  before[0] += 1;
  EXPECT_EQ(products(), before);
}

TEST_F(FastestCandidate, OfAnotherRankGivesItsBits) {
  set_fastest(1);
  GemmCache cache;
  choose_gemms(fixture_.blas(), cache, {scratch_.data(), static_cast<size_t>(scratch_.bytes())},
               fixture_.stream().get(), [](const std::string&) {});
  const std::vector<std::byte> bits = run();
  set_fastest(2);  // here, but rank 0 found otherwise
  Fixture other;
  const auto run_other = [&] {
    other.blas().run(other.gemm(case_, a_, b_, d_, d_, d_), other.stream().get());
    other.stream().synchronize();
    return d_.download();
  };
  EXPECT_NE(run_other(), bits);
  adopt_gemms(other.blas(), parse_gemm_cache(to_json(cache), "rank 0"));
  EXPECT_EQ(run_other(), bits);
}

TEST_F(FastestCandidate, IsTimedAgainWhenTheOneInTheFileIsRefused) {
  set_fastest(1);
  GemmCache cache;
  cache[gemm_device()][key()] = {
      .algorithm = {0xbad}, .candidate = 2, .candidates = 3, .seconds = 1, .first_seconds = 1};
  std::vector<std::string> lines;
  EXPECT_TRUE(choose_gemms(fixture_.blas(), cache, {scratch_.data(), static_cast<size_t>(scratch_.bytes())},
                           fixture_.stream().get(), [&](const std::string& line) { lines.push_back(line); }));
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_NE(lines[0].find("gemm D[24,40]"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("refused, cublasLtMatmulAlgoCheck: CUBLAS_STATUS_INVALID_VALUE"),
            std::string::npos);
  EXPECT_EQ(cache.at(gemm_device()).at(key()).candidate, 1);
  GemmChoice bad;
  bad.algorithm = {0xbad};
  auto before = products();
  EXPECT_TRUE(fixture_.blas().adopt(key(), bad));
  run();
  before[1] += 1;
  EXPECT_EQ(products(), before) << "a refused algorithm replaced the choice";
}

/// 256 + 1 - 256, each in another third of k: bf16 has no 257.
class SplitSums : public ::testing::TestWithParam<DType> {
 protected:
  static constexpr int64_t kDepth = 300;

  SplitSums() {
    std::vector<uint16_t> ones(kDepth, test::nearest_bf16(1)), terms(kDepth);
    terms[7] = test::nearest_bf16(256), terms[150] = test::nearest_bf16(1);
    terms[299] = test::nearest_bf16(-256);
    check(cudaMemcpy(a_.data(), ones.data(), kDepth * 2, cudaMemcpyHostToDevice));
    check(cudaMemcpy(b_.data(), terms.data(), kDepth * 2, cudaMemcpyHostToDevice));
    check(cudaStreamSynchronize(nullptr));
    run();
  }
  ~SplitSums() override { sim::set_blas_delays({}); }

  float run() {
    Gemm g;
    g.m = 1, g.n = 1, g.k = kDepth;
    g.a = a_.data(), g.b = b_.data(), g.d = d_.data();
    g.output = GetParam();
    fixture_.blas().run(g, fixture_.stream().get());
    fixture_.stream().synchronize();
    uint32_t bits = 0;
    check(cudaMemcpy(&bits, d_.data(), static_cast<size_t>(size_of(GetParam())), cudaMemcpyDeviceToHost));
    return std::bit_cast<float>(GetParam() == DType::kBf16 ? bits << 16 : bits);
  }
  GemmChoice tune_to_a_split() {
    FastestCandidate::set_fastest(2);
    return fixture_.blas().tune(fixture_.blas().shapes().at(0),
                                {scratch_.data(), static_cast<size_t>(scratch_.bytes())},
                                fixture_.stream().get());
  }

  DeviceMemory a_{kDepth * 2}, b_{kDepth * 2}, d_{4};
  DeviceMemory scratch_{BlasLt::workspace_bytes() + (1 << 20)};
  Fixture fixture_;
};

TEST_P(SplitSums, StayInFp32) {
  ASSERT_EQ(tune_to_a_split().candidate, 2);
  EXPECT_EQ(run(), 1.0f);
}

TEST_P(SplitSums, InTheOutputsTypeAreRefusedUnlessThatIsFp32) {
  GemmChoice choice = tune_to_a_split();
  for (const uint64_t scheme : {CUBLASLT_REDUCTION_SCHEME_INPLACE, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE}) {
    choice.algorithm[3] = scheme;  // as a file may have it
    const std::optional<std::string> refusal = fixture_.blas().adopt(fixture_.blas().shapes().at(0), choice);
    EXPECT_EQ(refusal.value_or("none"),
              GetParam() == DType::kFp32
                  ? "none"
                  : "its reduction scheme, " + std::to_string(scheme) + ", rounds partial sums to bf16");
    EXPECT_EQ(run(), 1.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(Outputs, SplitSums, ::testing::Values(DType::kBf16, DType::kFp32),
                         [](const auto& info) { return std::string(name_of(info.param)); });

class LimitedMultiprocessors : public FastestCandidate {
 protected:
  LimitedMultiprocessors() : FastestCandidate(3) {}
};

TEST_F(LimitedMultiprocessors, Trap24_AreWhatCublasIsToldAndPartOfTheShape) {
  EXPECT_EQ(sim::blas_record().multiprocessors, 3);
  EXPECT_EQ(key().sm_limit, 3);
  tune();
  run();
  EXPECT_EQ(sim::blas_record().multiprocessors, 3);
  for (const int64_t no_limit : {0, 16, 17}) {
    Fixture other(no_limit);
    other.blas().run(other.gemm(case_, a_, b_, d_, d_, d_), other.stream().get());
    other.stream().synchronize();
    EXPECT_EQ(sim::blas_record().multiprocessors, 0) << no_limit;
  }
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
