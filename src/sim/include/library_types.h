// Stand-in for CUDA's library_types.h: the data types that cuBLASLt is asked for.
#pragma once

typedef enum cudaDataType_t {
  CUDA_R_32F = 0,
  CUDA_R_16F = 2,
  CUDA_R_16BF = 14,
} cudaDataType;
