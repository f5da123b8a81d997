// The one way a kernel is launched, on CUDA and on the simulated device.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/error.h"

namespace minillm::kernels {

struct LaunchShape {
  dim3 grid;  ///< unbounded dimensions go on x: y and z end at 65535
  dim3 block;
  size_t shared_bytes = 0;  ///< dynamic shared memory
  cudaStream_t stream = nullptr;
};

/// Throws DeviceError naming the kernel when `code` is not cudaSuccess.
inline void check_launch(cudaError_t code, const char* kernel) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw DeviceError(std::string("launching kernel ") + kernel + ": " + cudaGetErrorString(code));
}

/// A property of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_launch(cudaGetDevice(&device), "on the current device");
  check_launch(cudaDeviceGetAttribute(&value, attribute, device), "on the current device");
  return value;
}

/// Launches `kernel(args...)`; `name` appears in errors and in the simulated device's counters. An empty grid
/// (a dimension of 0) does nothing: an empty tensor is no error.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape, Arguments... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
#if defined(__CUDACC__)
  if (shape.shared_bytes > 48 * 1024)
    check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shape.shared_bytes)),
                 name);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  check_launch(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(args)...), name);
#else
  check_launch(sim::launch(name, shape.grid, shape.block, shape.shared_bytes, shape.stream,
                           [kernel, ... args = static_cast<Parameters>(args)] { kernel(args...); }),
               name);
#endif
}

}  // namespace minillm::kernels
