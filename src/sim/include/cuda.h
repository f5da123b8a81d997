// Stand-in for the part of CUDA's driver API that the runtime has no equal of, under the vendor's names and
// values. As on CUDA, programs find the functions by cudaGetDriverEntryPointByVersion and link no driver.
#pragma once

extern "C" {

typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_INVALID_DEVICE = 101 } CUresult;
typedef int CUdevice;
typedef enum { CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102 } CUdevice_attribute;

CUresult cuDeviceGet(CUdevice* device, int ordinal);
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device);

}  // extern "C"
