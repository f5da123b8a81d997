// What tests can ask of the cuBLASLt stand-in: which candidate is the fastest, and what was computed.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace sim {

/// Candidates of the heuristic, first to last.
inline constexpr int kBlasCandidates = 3;

/// Every product takes so much longer, by candidate: products of tests are too small to be told apart by
/// time. 0 at first.
void set_blas_delays(const std::array<std::chrono::microseconds, kBlasCandidates>& delays);

struct BlasRecord {
  std::array<int64_t, kBlasCandidates> products{};  ///< so far, by candidate, as Counters::launches
  int multiprocessors = 0;                          ///< the last product's target; 0: none was set
};
BlasRecord blas_record();

}  // namespace sim
