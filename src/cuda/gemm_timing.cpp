// Timing of a shape's candidates, in scratch memory that is laid out as
//
//   workspace | set of operands | set of operands | … | memory written between candidates
//
// In training the operands of a product come from device memory. So each run takes the next set, and before
// the first of a candidate's runs as much as twice the L2 cache is written elsewhere.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "core/checked.h"
#include "core/error.h"
#include "cuda/check.h"
#include "cuda/gemm_plan.h"
#include "cuda/timing.h"

namespace minillm::cuda {
namespace {

constexpr int kTimedRuns = 7;
constexpr int kRuns = 1 + kTimedRuns;  // the first loads the kernel
constexpr int64_t kBoundary = 256;

/// Where the operands of one set lie, in bytes from its start, aligned exactly as the key says.
struct OperandSet {
  int64_t a, b, c, d, bias, bytes;

  explicit OperandSet(const GemmKey& key) {
    int64_t end = 0;
    const auto place = [&end](int64_t elements, DType type, uint32_t alignment) {
      const int64_t offset = round_up(end, kBoundary) + alignment % kBoundary;
      end = offset + elements * size_of(type);
      return offset;
    };
    a = place(key.m * key.k, key.input, key.align_a);
    b = place(key.k * key.n, key.input, key.align_b);
    d = place(key.m * key.n, key.output, key.align_d);
    // In place, if alignments allow it: the traffic is the same, and the memory is there for sure.
    c = key.align_c == key.align_d ? d : place(key.m * key.n, key.output, key.align_c);
    bias = place(key.bias ? key.n : 0, key.output, key.align_bias);
    bytes = round_up(end, kBoundary);
  }
};

class CandidateTimer {
 public:
  CandidateTimer(GemmPlan& plan, const GemmKey& key, std::span<std::byte> scratch, cudaStream_t stream)
      : plan_(plan), key_(key), set_(key), workspace_(scratch.data()), stream_(stream) {
    const int64_t room = std::ssize(scratch) - BlasLt::workspace_bytes();
    count_ = cold_sets(set_.bytes, kRuns, room);
    sets_ = workspace_ + BlasLt::workspace_bytes();
    flush_ = sets_ + count_ * set_.bytes;
    flush_bytes_ = std::min(2 * l2_cache_bytes(), room - count_ * set_.bytes);
  }

  /// The median; infinite when the algorithm cannot be launched after all.
  double seconds(const cublasLtMatmulAlgo_t& algorithm) {
    // Also gives the host a lead: events are then reached by the device one right after the other.
    fill_with_numbers({sets_, static_cast<size_t>(count_ * set_.bytes)}, stream_);
    if (flush_bytes_ > 0) check(cudaMemsetAsync(flush_, 0, static_cast<size_t>(flush_bytes_), stream_));
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const auto launch = [&](int run) {
      if (status == CUBLAS_STATUS_SUCCESS)
        status = plan_.launch(algorithm, operands(run % count_), workspace_, stream_);
    };
    const std::vector<double> seconds = time_runs(kRuns, launch, stream_);
    if (status != CUBLAS_STATUS_SUCCESS) return std::numeric_limits<double>::infinity();
    return median({seconds.begin() + 1, seconds.end()});
  }

 private:
  Gemm operands(int64_t number) const {
    std::byte* const at = sets_ + number * set_.bytes;
    Gemm g;
    g.m = key_.m, g.n = key_.n, g.k = key_.k;
    g.a = at + set_.a, g.transpose_a = key_.transpose_a;
    g.b = at + set_.b, g.transpose_b = key_.transpose_b;
    g.d = at + set_.d, g.c = at + set_.c;
    g.beta = key_.accumulate ? 1.0f : 0.0f;
    g.bias = key_.bias ? at + set_.bias : nullptr;
    g.input = key_.input, g.output = key_.output;
    return g;
  }

  GemmPlan& plan_;
  const GemmKey& key_;
  OperandSet set_;
  std::byte* workspace_;
  cudaStream_t stream_;
  std::byte *sets_ = nullptr, *flush_ = nullptr;
  int64_t count_ = 0, flush_bytes_ = 0;
};

}  // namespace

int64_t BlasLt::tune_bytes(const GemmKey& key) {
  return workspace_bytes() + OperandSet(key).bytes;
}

GemmChoice time_candidates(GemmPlan& plan, const GemmKey& key, std::span<std::byte> scratch,
                           cudaStream_t stream) {
  if (std::ssize(scratch) < BlasLt::tune_bytes(key) ||
      reinterpret_cast<uintptr_t>(scratch.data()) % kBoundary != 0)
    throw InternalError(describe(key) + ": tuning needs 256-byte aligned scratch memory of " +
                        std::to_string(BlasLt::tune_bytes(key)) + " bytes; given were " +
                        std::to_string(scratch.size()));
  const std::vector<cublasLtMatmulAlgo_t> candidates = plan.candidates(BlasLt::kMostCandidates);
  CandidateTimer timer(plan, key, scratch, stream);
  std::vector<double> seconds;
  for (const cublasLtMatmulAlgo_t& candidate : candidates) seconds.push_back(timer.seconds(candidate));
  check(cudaStreamSynchronize(stream));
  const int best = fastest_candidate(seconds);
  if (best < 0) throw DeviceError(describe(key) + ": none of cuBLASLt's candidates can be launched");
  const auto first = std::ranges::find_if(seconds, [](double value) { return std::isfinite(value); });
  GemmChoice choice{.candidate = best,
                    .candidates = static_cast<int>(candidates.size()),
                    .seconds = seconds[static_cast<size_t>(best)],
                    .first_seconds = *first};
  const auto& words = candidates[static_cast<size_t>(best)].data;
  static_assert(sizeof choice.algorithm == sizeof words);
  std::memcpy(choice.algorithm.data(), words, sizeof words);
  return choice;
}

}  // namespace minillm::cuda
