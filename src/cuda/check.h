// CUDA runtime results as exceptions.
#pragma once

#include <cuda_runtime.h>

#include <source_location>

namespace minillm::cuda {

/// Throws DeviceError, or MemoryError where the device has no memory left, naming the call's place and CUDA's
/// message when `code` is not cudaSuccess.
void check(cudaError_t code, std::source_location where = std::source_location::current());

}  // namespace minillm::cuda
