// The least time that a device needs for a cost, from what it is seen to do at its best.
#pragma once

#include "core/cost.h"
#include "core/dtype.h"

namespace minillm::profile {

struct Roofline {
  double copy_bytes_per_s = 0;  ///< a copy of 1 GiB: bytes read and written
  double gemm_flops_per_s = 0;  ///< a square product of 8192, the fastest of cuBLASLt's candidates
  double kernel_s = 0;          ///< a kernel with next to nothing to do, in a row of them

  /// Neither the minimal bytes nor the flops can be done faster.
  double floor_s(const Cost& cost) const;
  /// Whether it is the bytes that take longer.
  bool memory_bound(const Cost& cost) const;
};

/// Measures all on the current device, the product in `dtype` with normally distributed numbers. Where
/// memory is short, sizes are halved until they fit.
Roofline measure_roofline(DType dtype, int repeats);

/// Roofline::kernel_s alone.
double measure_kernel_s(int repeats);

}  // namespace minillm::profile
