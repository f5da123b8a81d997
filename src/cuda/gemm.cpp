#include "cuda/gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <compare>
#include <map>
#include <string>

#include "core/checked.h"
#include "core/error.h"

namespace minillm::cuda {
namespace {

std::string describe(const Gemm& g) {
  const auto operand = [](const char* name, bool transpose, int64_t rows, int64_t cols) {
    return std::string(name) + "[" + std::to_string(rows) + "," + std::to_string(cols) + "]" +
           (transpose ? " (transposed)" : "");
  };
  return "gemm D[" + std::to_string(g.m) + "," + std::to_string(g.n) + "] " + std::string(name_of(g.output)) +
         " = " + operand("A", g.transpose_a, g.m, g.k) + " " + std::string(name_of(g.input)) + " * " +
         operand("B", g.transpose_b, g.k, g.n) + (g.beta != 0 ? " + beta * C" : "") +
         (g.bias ? " + bias" : "");
}

void check(cublasStatus_t status, const char* call, const Gemm& gemm) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw DeviceError(describe(gemm) + ": " + call + ": " + cublasLtGetStatusName(status) + ": " +
                    cublasLtGetStatusString(status));
}

template <class Handle, cublasStatus_t (*destroy)(Handle)>
class Owner {
 public:
  Owner() = default;
  ~Owner() {
    if (handle_) (void)destroy(handle_);
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  Handle* out() { return &handle_; }
  Handle get() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};
using LtHandle = Owner<cublasLtHandle_t, cublasLtDestroy>;
using Descriptor = Owner<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owner<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType_t cuda_type(DType type) {
  return type == DType::kFp32 ? CUDA_R_32F : CUDA_R_16BF;
}

/// The largest power of two up to 256 that divides the address: what an algorithm may rely on.
uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(std::min<uintptr_t>(address & -address, 256));
}

/// What an algorithm is chosen for.
struct Key {
  int64_t m, n, k;
  bool transpose_a, transpose_b, bias;
  DType input, output;
  uint32_t align_a, align_b, align_c, align_d;
  auto operator<=>(const Key&) const = default;
};

/// C is not read when beta is 0, but cuBLASLt wants a valid matrix: D itself.
const void* c_operand(const Gemm& gemm) {
  return gemm.beta != 0 ? gemm.c : gemm.d;
}

Key key_of(const Gemm& g) {
  return {g.m,
          g.n,
          g.k,
          g.transpose_a,
          g.transpose_b,
          g.bias != nullptr,
          g.input,
          g.output,
          alignment_of(g.a),
          alignment_of(g.b),
          alignment_of(c_operand(g)),
          alignment_of(g.d)};
}

void require_valid(const Gemm& g) {
  if (g.m <= 0 || g.n <= 0 || g.k <= 0) throw InternalError(describe(g) + ": m, n and k must be positive");
  if (!g.a || !g.b || !g.d) throw InternalError(describe(g) + ": a, b and d must not be null");
  if (g.beta != 0 && !g.c) throw InternalError(describe(g) + ": c must not be null when beta is not 0");
}

/// One shape's descriptors and algorithm. cuBLASLt is column-major, and a row-major matrix is its own
/// transpose there: so D transposed = op(B) transposed * op(A) transposed is computed, with B as cuBLASLt's
/// first operand. Its bias runs along the rows of the transposed D: our n.
class Plan {
 public:
  Plan(cublasLtHandle_t handle, const Gemm& gemm, const Key& key) {
    describe_operation(gemm);
    describe_matrices(gemm);
    choose_algorithm(handle, gemm, key);
  }

  void run(cublasLtHandle_t handle, const Gemm& g, void* workspace, cudaStream_t stream) {
    if (g.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias, g);
    const float alpha = 1;
    check(cublasLtMatmul(handle, operation_.get(), &alpha, g.b, b_.get(), g.a, a_.get(), &g.beta,
                         c_operand(g), d_.get(), g.d, d_.get(), &algorithm_, workspace,
                         static_cast<size_t>(BlasLt::workspace_bytes()), stream),
          "cublasLtMatmul", g);
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value, const Gemm& gemm) {
    check(cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute", gemm);
  }

  void describe_operation(const Gemm& g) {
    check(cublasLtMatmulDescCreate(operation_.out(), CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate", g);
    set<int32_t>(CUBLASLT_MATMUL_DESC_TRANSA, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, g);
    set<int32_t>(CUBLASLT_MATMUL_DESC_TRANSB, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, g);
    if (!g.bias) return;
    set<uint32_t>(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, g);
    set<int32_t>(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(g.output), g);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias, g);
  }

  void describe_matrices(const Gemm& g) {
    const auto create = [&g](Layout& layout, DType type, int64_t rows, int64_t cols) {
      check(cublasLtMatrixLayoutCreate(layout.out(), cuda_type(type), narrow<uint64_t>(rows),
                                       narrow<uint64_t>(cols), rows),
            "cublasLtMatrixLayoutCreate", g);
    };
    create(a_, g.input, g.transpose_a ? g.m : g.k, g.transpose_a ? g.k : g.m);
    create(b_, g.input, g.transpose_b ? g.k : g.n, g.transpose_b ? g.n : g.k);
    create(d_, g.output, g.n, g.m);
  }

  void choose_algorithm(cublasLtHandle_t handle, const Gemm& g, const Key& key) {
    Preference preference;
    check(cublasLtMatmulPreferenceCreate(preference.out()), "cublasLtMatmulPreferenceCreate", g);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value),
            "cublasLtMatmulPreferenceSetAttribute", g);
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(BlasLt::workspace_bytes()));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_b);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_a);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_c);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_d);
    // Partial sums over k in the output's type would be rounded to bf16.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_MASK & ~CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle, operation_.get(), b_.get(), a_.get(), d_.get(), d_.get(),
                                         preference.get(), 1, &result, &found),
          "no algorithm: cublasLtMatmulAlgoGetHeuristic", g);
    if (found < 1) check(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm: cublasLtMatmulAlgoGetHeuristic", g);
    check(result.state, "no algorithm: cublasLtMatmulAlgoGetHeuristic", g);
    algorithm_ = result.algo;
  }

  Descriptor operation_;
  Layout a_, b_, d_;  ///< D's serves C, too
  cublasLtMatmulAlgo_t algorithm_{};
};

}  // namespace

Cost gemm_cost(const Gemm& g) {
  const int64_t outputs = g.m * g.n * (g.beta != 0 ? 2 : 1) + (g.bias ? g.n : 0);
  return {(g.m * g.k + g.k * g.n) * size_of(g.input) + outputs * size_of(g.output), 2 * g.m * g.n * g.k};
}

struct BlasLt::State {
  LtHandle handle;
  void* workspace = nullptr;
  std::map<Key, Plan> plans;
};

BlasLt::BlasLt(void* workspace) : state_(std::make_unique<State>()) {
  if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 256 != 0)
    throw InternalError("BlasLt: the workspace must be 256-byte aligned device memory");
  state_->workspace = workspace;
  const cublasStatus_t status = cublasLtCreate(state_->handle.out());
  if (status != CUBLAS_STATUS_SUCCESS)
    throw DeviceError(std::string("cublasLtCreate: ") + cublasLtGetStatusName(status) + ": " +
                      cublasLtGetStatusString(status));
}

BlasLt::~BlasLt() = default;

void BlasLt::run(const Gemm& gemm, cudaStream_t stream) {
  require_valid(gemm);
  const Key key = key_of(gemm);
  auto found = state_->plans.find(key);
  if (found == state_->plans.end())
    found = state_->plans.try_emplace(key, state_->handle.get(), gemm, key).first;
  found->second.run(state_->handle.get(), gemm, state_->workspace, stream);
}

}  // namespace minillm::cuda
