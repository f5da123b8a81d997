// One choice of algorithms for all ranks.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <span>

#include "comm/bootstrap.h"
#include "config/config.h"
#include "cuda/gemm.h"

namespace minillm::train {

/// Rank 0 chooses for every shape that `blas` has run, from the file config.cache or by timing in `scratch`,
/// prints a line for each, and writes the file when it learned something; the other ranks follow, because
/// another algorithm is another order of sums. Collective; overwrites `scratch` on rank 0. Calls `progress`
/// on all ranks after each shape. Throws InputError for a file that cannot be read or written, UsageError and
/// DeviceError as cuda::adopt_gemms().
void choose_gemms(cuda::BlasLt& blas, const config::Gemm& config, comm::Bootstrap& bootstrap,
                  std::span<std::byte> scratch, cudaStream_t stream, const std::function<void()>& progress);

}  // namespace minillm::train
