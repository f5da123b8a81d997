#include "cuda/gemm.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/gemm_plan.h"

namespace minillm::cuda {
namespace {

/// What an algorithm may rely on.
uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(std::min<uintptr_t>(address & -address, 256));
}

GemmKey key_of(const Gemm& g, int sm_limit) {
  return {.m = g.m,
          .n = g.n,
          .k = g.k,
          .transpose_a = g.transpose_a,
          .transpose_b = g.transpose_b,
          .accumulate = g.beta != 0,
          .bias = g.bias != nullptr,
          .input = g.input,
          .output = g.output,
          .align_a = alignment_of(g.a),
          .align_b = alignment_of(g.b),
          .align_c = alignment_of(c_operand(g)),
          .align_d = alignment_of(g.d),
          .align_bias = alignment_of(g.bias),
          .sm_limit = sm_limit};
}

void require_valid(const Gemm& g, const GemmKey& key) {
  if (g.m <= 0 || g.n <= 0 || g.k <= 0) throw InternalError(describe(key) + ": m, n and k must be positive");
  if (!g.a || !g.b || !g.d) throw InternalError(describe(key) + ": a, b and d must not be null");
  if (g.beta != 0 && !g.c) throw InternalError(describe(key) + ": c must not be null when beta is not 0");
}

/// Of the multiprocessors of the current device; 0 when that is no limit.
int effective_limit(int64_t sm_limit) {
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return sm_limit > 0 && sm_limit < multiprocessors ? static_cast<int>(sm_limit) : 0;
}

/// A shape that was run, tuned or adopted.
struct Shape {
  GemmPlan plan;
  std::optional<cublasLtMatmulAlgo_t> algorithm;  ///< in use; none until the first of the three
  std::optional<GemmChoice> choice;               ///< where it comes from; none for the heuristic's first
  bool run = false;

  Shape(cublasLtHandle_t handle, const GemmKey& key, const std::byte* memory) : plan(handle, key, memory) {}

  void use(const GemmChoice& chosen) {
    choice = chosen;
    std::memcpy(algorithm.emplace().data, chosen.algorithm.data(), sizeof chosen.algorithm);
  }
};

}  // namespace

Cost gemm_cost(const Gemm& g) {
  const int64_t outputs = g.m * g.n * (g.beta != 0 ? 2 : 1) + (g.bias ? g.n : 0);
  return {(g.m * g.k + g.k * g.n) * size_of(g.input) + outputs * size_of(g.output), 2 * g.m * g.n * g.k};
}

struct BlasLt::State {
  LtHandle handle;
  std::byte* workspace = nullptr;
  int sm_limit = 0;
  std::map<GemmKey, Shape> shapes;
  std::vector<GemmKey> order;  // of those that were run

  Shape& shape(const GemmKey& key) {
    const auto found = shapes.find(key);
    return found != shapes.end() ? found->second
                                 : shapes.try_emplace(key, handle.get(), key, workspace).first->second;
  }
};

BlasLt::BlasLt(void* workspace, int64_t sm_limit) : state_(std::make_unique<State>()) {
  if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 256 != 0)
    throw InternalError("BlasLt: the workspace must be 256-byte aligned device memory");
  state_->workspace = static_cast<std::byte*>(workspace);
  state_->sm_limit = effective_limit(sm_limit);
  const cublasStatus_t status = cublasLtCreate(state_->handle.out());
  if (status != CUBLAS_STATUS_SUCCESS) throw DeviceError("cublasLtCreate: " + describe(status));
}

BlasLt::~BlasLt() = default;

void BlasLt::run(const Gemm& gemm, cudaStream_t stream) {
  const GemmKey key = key_of(gemm, state_->sm_limit);
  require_valid(gemm, key);
  Shape& shape = state_->shape(key);
  if (!shape.algorithm) shape.algorithm = shape.plan.candidates(1).front();
  if (!shape.run) state_->order.push_back(key);
  shape.run = true;
  check(shape.plan.launch(*shape.algorithm, gemm, state_->workspace, stream), "cublasLtMatmul", key);
}

const std::vector<GemmKey>& BlasLt::shapes() const {
  return state_->order;
}

GemmChoice BlasLt::tune(const GemmKey& key, std::span<std::byte> scratch, cudaStream_t stream) {
  Shape& shape = state_->shape(key);
  if (!shape.choice) shape.use(time_candidates(shape.plan, key, scratch, stream));
  return *shape.choice;
}

std::optional<std::string> BlasLt::adopt(const GemmKey& key, const GemmChoice& choice) {
  Shape& shape = state_->shape(key);
  cublasLtMatmulAlgo_t algorithm;
  std::memcpy(algorithm.data, choice.algorithm.data(), sizeof algorithm.data);
  std::optional<std::string> refusal = shape.plan.refusal(algorithm);
  if (!refusal) shape.use(choice);
  return refusal;
}

}  // namespace minillm::cuda
