// The cuBLASLt stand-in's products: validation, the heuristic, and the operation put on the stream.
#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>

#include "sim/blas.h"
#include "sim/blas_compute.h"
#include "sim/blas_descriptors.h"
#include "sim/device.h"
#include "sim/failure.h"
#include "sim/sanitizer.h"

namespace {

std::atomic<int64_t> products[sim::kBlasCandidates];
std::atomic<int> last_multiprocessors;
std::atomic<int64_t> delays_us[sim::kBlasCandidates];

/// What the opaque algorithm holds: the problem that the heuristic was asked about, and which candidate it
/// is.
struct Algorithm {
  static constexpr uint32_t kMagic = 0x6d6d6c74;
  uint32_t magic = kMagic;
  int32_t candidate = 0;
  uint32_t alignment[4] = {};
  uint32_t reduction_scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
  uint64_t shape_hash = 0;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t::data));

struct Layouts {
  cublasLtMatrixLayout_t a, b, c, d;
};

bool supported_types(const cublasLtMatmulDescOpaque_t& desc, const Layouts& l) {
  const bool inputs = l.a->type == l.b->type && (l.a->type == CUDA_R_16BF || l.a->type == CUDA_R_32F);
  const bool outputs = l.c->type == l.d->type && (l.d->type == CUDA_R_32F || l.d->type == l.a->type);
  const bool bias = desc.bias_type == -1 || desc.bias_type == l.d->type;
  return inputs && outputs && bias && desc.compute == CUBLAS_COMPUTE_32F && desc.scale == CUDA_R_32F &&
         (desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT || desc.epilogue == CUBLASLT_EPILOGUE_BIAS);
}

bool consistent_shapes(const cublasLtMatmulDescOpaque_t& desc, const Layouts& l) {
  for (const auto* layout : {l.a, l.b, l.c, l.d}) {
    constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max() / 8;
    if (layout->rows == 0 || layout->cols == 0 || layout->rows > kLargest || layout->cols > kLargest)
      return false;
    if (layout->ld < static_cast<int64_t>(layout->rows)) return false;
  }
  const bool ta = desc.transpose_a != CUBLAS_OP_N, tb = desc.transpose_b != CUBLAS_OP_N;
  const uint64_t m = ta ? l.a->cols : l.a->rows, k = ta ? l.a->rows : l.a->cols;
  const uint64_t k_of_b = tb ? l.b->cols : l.b->rows, n = tb ? l.b->rows : l.b->cols;
  return k == k_of_b && l.d->rows == m && l.d->cols == n && l.c->rows == m && l.c->cols == n;
}

cublasStatus_t validate(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const Layouts& l) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (!desc || !l.a || !l.b || !l.c || !l.d) return CUBLAS_STATUS_INVALID_VALUE;
  if (!consistent_shapes(*desc, l)) return CUBLAS_STATUS_INVALID_VALUE;
  return supported_types(*desc, l) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

/// FNV-1a over everything that an algorithm is chosen for.
uint64_t shape_hash(const cublasLtMatmulDescOpaque_t& desc, const Layouts& l) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
  add(desc.transpose_a), add(desc.transpose_b), add(desc.epilogue), add(desc.multiprocessors);
  for (const auto* layout : {l.a, l.b, l.c, l.d})
    add(layout->type), add(layout->rows), add(layout->cols), add(layout->ld);
  return hash;
}

/// What the algorithm says if it was chosen for this problem.
std::optional<Algorithm> algorithm_for(const cublasLtMatmulAlgo_t& algo,
                                       const cublasLtMatmulDescOpaque_t& desc, const Layouts& l) {
  Algorithm algorithm;
  std::memcpy(&algorithm, algo.data, sizeof algorithm);
  if (algorithm.magic != Algorithm::kMagic || algorithm.shape_hash != shape_hash(desc, l) ||
      algorithm.candidate < 0 || algorithm.candidate >= sim::kBlasCandidates)
    return std::nullopt;
  return algorithm;
}

uint32_t worst_reduction_scheme(uint32_t allowed) {
  for (const uint32_t scheme : {CUBLASLT_REDUCTION_SCHEME_INPLACE, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE,
                                CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE})
    if (allowed & scheme) return scheme;
  return CUBLASLT_REDUCTION_SCHEME_NONE;
}

bool aligned(const void* pointer, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

/// The vendor allows C to be D and no other overlap with D; here that would go unnoticed, as inputs are
/// copied first.
bool overlap(const void* x, const cublasLtMatrixLayoutOpaque_t& lx, const void* d,
             const cublasLtMatrixLayoutOpaque_t& ld) {
  const auto end = [](const void* p, const cublasLtMatrixLayoutOpaque_t& l) {
    const uint64_t elements = (l.cols - 1) * static_cast<uint64_t>(l.ld) + l.rows;
    return static_cast<const char*>(p) + elements * sim::blas_element_size(l.type);
  };
  return static_cast<const char*>(x) < end(d, ld) && static_cast<const char*>(d) < end(x, lx);
}

sim::BlasMatrix matrix(const char* name, const void* data, const cublasLtMatrixLayoutOpaque_t& layout) {
  return {name,
          const_cast<void*>(data),
          layout.type,
          static_cast<int64_t>(layout.rows),
          static_cast<int64_t>(layout.cols),
          layout.ld};
}

int64_t span_bytes(const sim::BlasMatrix& m) {
  return ((m.cols - 1) * m.ld + m.rows) * sim::blas_element_size(m.type);
}

/// What on a GPU would be an illegal address, if it was noticed at all.
void require_device_memory(const char* name, const void* data, int64_t bytes) {
  const sim::Memory::Range range = sim::device().memory.classify(data, static_cast<size_t>(bytes));
  if (range.kind != sim::Memory::Kind::kPageable && range.inside) return;
  throw std::runtime_error(std::string("cublasLtMatmul: the ") + std::to_string(bytes) + " bytes of " + name +
                           " do not lie within one allocation of the device");
}

void require_device_memory(const sim::BlasProblem& p) {
  // The check orders no streams, and its stack may be the host's.
  const sim::InvisibleScope invisible;
  for (const sim::BlasMatrix* m : {&p.a, &p.b, &p.d}) require_device_memory(m->name, m->data, span_bytes(*m));
  if (p.beta != 0) require_device_memory(p.c.name, p.c.data, span_bytes(p.c));
  if (p.bias) require_device_memory("bias", p.bias, p.d.rows * sim::blas_element_size(p.d.type));
}

cublasStatus_t enqueue(const sim::BlasProblem& problem, int candidate, cudaStream_t stream) {
  sim::Scheduler& scheduler = sim::device().scheduler;
  if (!scheduler.exists(stream)) return CUBLAS_STATUS_INVALID_VALUE;
  if (sim::failure() != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  const cudaError_t error = scheduler.enqueue(stream, [problem, candidate] {
    require_device_memory(problem);
    sim::compute_matmul(problem);
    if (const int64_t delay = delays_us[candidate])
      std::this_thread::sleep_for(std::chrono::microseconds(delay));
  });
  if (error != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  scheduler.at_launch(stream, [candidate] { ++products[candidate]; });
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

namespace sim {

void set_blas_delays(const std::array<std::chrono::microseconds, kBlasCandidates>& delays) {
  for (int i = 0; i < kBlasCandidates; ++i) delays_us[i] = delays[i].count();
}

BlasRecord blas_record() {
  BlasRecord record;
  for (int i = 0; i < kBlasCandidates; ++i) record.products[i] = products[i];
  record.multiprocessors = last_multiprocessors;
  return record;
}

}  // namespace sim

extern "C" {

size_t cublasLtGetVersion() {
  return 10000;  // 1.0.0, as the vendor counts
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* returned) {
  if (!returned || !results || requested < 1 || !preference) return CUBLAS_STATUS_INVALID_VALUE;
  *returned = 0;
  const Layouts layouts{a, b, c, d};
  const cublasStatus_t status = validate(handle, desc, layouts);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  Algorithm algorithm;
  for (int i = 0; i < 4; ++i) {
    const int64_t element = sim::blas_element_size((i < 2 ? a : d)->type);
    if (!std::has_single_bit(preference->alignment[i]) || preference->alignment[i] < element)
      return CUBLAS_STATUS_NOT_SUPPORTED;
    algorithm.alignment[i] = std::min(preference->alignment[i], 256u);
  }
  algorithm.shape_hash = shape_hash(*desc, layouts);
  const uint32_t scheme = worst_reduction_scheme(preference->reduction_schemes);
  *returned = std::min(requested, scheme ? sim::kBlasCandidates : 1);
  for (int i = 0; i < *returned; ++i) {
    algorithm.candidate = i;
    algorithm.reduction_scheme = i == 0 ? uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE} : scheme;
    results[i] = {};
    std::memcpy(results[i].algo.data, &algorithm, sizeof algorithm);
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algo,
                                       cublasLtMatmulHeuristicResult_t* result) {
  if (!algo || !result) return CUBLAS_STATUS_INVALID_VALUE;
  const Layouts layouts{a, b, c, d};
  if (const cublasStatus_t status = validate(handle, desc, layouts)) return status;
  if (!algorithm_for(*algo, *desc, layouts)) return CUBLAS_STATUS_INVALID_VALUE;
  result->workspaceSize = 0;
  result->state = CUBLAS_STATUS_SUCCESS;
  result->wavesCount = 0;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute,
                                                    void* value, size_t bytes, size_t* written) {
  Algorithm algorithm;
  if (!algo || !value || attribute != CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME ||
      bytes != sizeof algorithm.reduction_scheme)
    return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&algorithm, algo->data, sizeof algorithm);
  if (algorithm.magic != Algorithm::kMagic) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(value, &algorithm.reduction_scheme, bytes);
  if (written) *written = bytes;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  const Layouts layouts{a, b, c, d};
  const cublasStatus_t status = validate(handle, desc, layouts);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (!alpha || !beta || !A || !B || !D) return CUBLAS_STATUS_INVALID_VALUE;
  float scales[2];
  std::memcpy(&scales[0], alpha, sizeof(float));
  std::memcpy(&scales[1], beta, sizeof(float));
  if (scales[1] != 0 && !C) return CUBLAS_STATUS_INVALID_VALUE;
  if (overlap(A, *a, D, *d) || overlap(B, *b, D, *d)) return CUBLAS_STATUS_INVALID_VALUE;
  if (scales[1] != 0 && (C == D ? c->ld != d->ld : overlap(C, *c, D, *d))) return CUBLAS_STATUS_INVALID_VALUE;
  if (workspace_bytes > 0 && (!workspace || !aligned(workspace, 256))) return CUBLAS_STATUS_INVALID_VALUE;
  const bool with_bias = desc->epilogue == CUBLASLT_EPILOGUE_BIAS;
  if (with_bias && !desc->bias) return CUBLAS_STATUS_INVALID_VALUE;
  int candidate = 0;
  bool sum_in_output_type = false;
  if (algo) {
    const std::optional<Algorithm> algorithm = algorithm_for(*algo, *desc, layouts);
    if (!algorithm) return CUBLAS_STATUS_INVALID_VALUE;
    const void* operands[4] = {A, B, scales[1] != 0 ? C : D, D};
    for (int i = 0; i < 4; ++i)
      if (!aligned(operands[i], algorithm->alignment[i])) return CUBLAS_STATUS_NOT_SUPPORTED;
    candidate = algorithm->candidate;
    sum_in_output_type = algorithm->reduction_scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE ||
                         algorithm->reduction_scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  }
  const sim::BlasProblem problem{matrix("A", A, *a),
                                 matrix("B", B, *b),
                                 matrix("C", C, *c),
                                 matrix("D", D, *d),
                                 desc->transpose_a != CUBLAS_OP_N,
                                 desc->transpose_b != CUBLAS_OP_N,
                                 scales[0],
                                 scales[1],
                                 with_bias ? desc->bias : nullptr,
                                 candidate + 1,
                                 sum_in_output_type};
  last_multiprocessors = desc->multiprocessors;
  return enqueue(problem, candidate, stream);
}

}  // extern "C"
