// Seconds of a case on the device.
#pragma once

#include <cstdint>

#include "cuda/gemm.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "profile/cases.h"

namespace minillm::profile {

struct MeterOptions {
  int repeats = 20;               ///< timed calls of a case, at least 1
  int64_t sm_limit = 0;           ///< of products; 0: all multiprocessors
  bool fastest_products = false;  ///< of cuBLASLt's candidates; false: its first
};

class Meter {
 public:
  explicit Meter(const MeterOptions& options);

  /// The median of the calls, whose operands are in no cache. Device memory for several sets of operands is
  /// taken meanwhile, or for one where there is not more. Throws MemoryError naming the case when one set
  /// does not fit either, and what the case throws.
  double seconds(const Case& c);

 private:
  MeterOptions options_;
  cuda::Stream stream_;
  cuda::DeviceMemory workspace_;
  cuda::BlasLt blas_;
};

}  // namespace minillm::profile
