// The driver API's functions, and how programs find them.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

#include "sim/control.h"
#include "sim/failure.h"

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (device == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *device = ordinal;
  return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
  if (value == nullptr || attribute != CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    return CUDA_ERROR_INVALID_VALUE;
  *value = sim::settings().nccl_memory != sim::NcclMemory::kLocal;
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  if (std::strcmp(symbol, "cuDeviceGet") == 0) *function = reinterpret_cast<void*>(&cuDeviceGet);
  if (std::strcmp(symbol, "cuDeviceGetAttribute") == 0)
    *function = reinterpret_cast<void*>(&cuDeviceGetAttribute);
  if (found != nullptr) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return sim::finish();
}
