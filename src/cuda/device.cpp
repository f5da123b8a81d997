#include "cuda/device.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "core/error.h"
#include "cuda/check.h"

namespace minillm::cuda {
namespace {

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device));
  return device;
}

int attribute(cudaDeviceAttr which) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, current_device()));
  return value;
}

/// The driver's function, found when it is called: programs that link the driver do not start without one,
/// and `minillm plan` does. Throws DeviceError where the driver has none.
template <class Function>
Function* driver_function(const char* name) {
  constexpr unsigned kVersion = 12000;  // of the function's parameters
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &function, kVersion, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || function == nullptr)
    throw DeviceError(std::string("the CUDA driver has no ") + name + "; it is too old");
  return reinterpret_cast<Function*>(function);
}

void check_driver(CUresult result, const char* call) {
  if (result != CUDA_SUCCESS)
    throw DeviceError(std::string(call) + ": CUresult " + std::to_string(static_cast<int>(result)));
}

}  // namespace

int compute_capability() {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
}

bool has_virtual_memory_management() {
  CUdevice device = 0;
  int value = 0;
  check_driver(driver_function<decltype(cuDeviceGet)>("cuDeviceGet")(&device, current_device()),
               "cuDeviceGet");
  check_driver(driver_function<decltype(cuDeviceGetAttribute)>("cuDeviceGetAttribute")(
                   &value, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device),
               "cuDeviceGetAttribute");
  return value != 0;
}

}  // namespace minillm::cuda
