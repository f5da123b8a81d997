// What tests/scripts/sass/fixture.sm_*.{sass,resources,ptxas} were made of: kernels with the faults that
// scripts/sass_report.py must find, and the same kernels without them.
#include <cuda_bf16.h>

/// Named as a variant for 16-byte accesses, but each is of 4 bytes.
template <class T, int N>
__global__ void narrow_kernel(T* y, const T* x, long count) {
#pragma unroll 1
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < count; i += (long)gridDim.x * blockDim.x)
    y[i] = x[i] * 2.0f;
}
template __global__ void narrow_kernel<float, 4>(float*, const float*, long);

template <class T, int N>
__global__ void wide_kernel(float4* y, const float4* x, long count) {
#pragma unroll 1
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < count; i += (long)gridDim.x * blockDim.x) {
    float4 v = x[i];
    v.x *= 2, v.y *= 2, v.z *= 2, v.w *= 2;
    y[i] = v;
  }
}
template __global__ void wide_kernel<float, 4>(float4*, const float4*, long);

/// 32 registers are left to 40 values.
__global__ void __launch_bounds__(1024, 2) spill_kernel(float* y, const float* x) {
  float v[40], sum = 0;
  for (int k = 0; k < 40; ++k) sum += v[k] = x[k * 1024 + threadIdx.x];
  __syncthreads();
  for (int k = 0; k < 40; ++k) y[k * 1024 + threadIdx.x] = v[k] * sum;
}

/// Three loops: rows, columns in it, and one that comes after; a square root has a slow path aside.
__global__ void nested_kernel(float* y, const float4* x, int rows, int columns) {
#pragma unroll 1
  for (int r = blockIdx.x; r < rows; r += gridDim.x) {
    float sum = 0;
#pragma unroll 1
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
      const float4 v = x[(long)r * columns + c];
      if (v.x > 0) sum += sqrtf(v.x) + v.y + v.z + v.w;
    }
    y[(long)r * blockDim.x + threadIdx.x] = sum;
  }
#pragma unroll 1
  for (int r = blockIdx.x; r < rows; r += gridDim.x) y[r] = 0;
}

/// Four products of tensor cores per iteration.
__global__ void attention_forward_mma_kernel(float* y, const unsigned* x, int tiles) {
  __shared__ unsigned tile[1024];
  float c[4] = {};
  unsigned a[4], b[2];
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    __syncthreads();
    tile[threadIdx.x] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    const unsigned at = (unsigned)__cvta_generic_to_shared(&tile[(threadIdx.x & 31) * 4]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(at));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1])
                 : "r"(at));
#pragma unroll
    for (int k = 0; k < 4; ++k)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
          "{%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  for (int k = 0; k < 4; ++k) y[threadIdx.x * 4 + k] = c[k];
}

/// Named as a tensor-core kernel, but it multiplies by FFMA.
__global__ void attention_backward_key_mma_kernel(float* y, const float* x, int tiles) {
  float sum = 0;
  for (int i = 0; i < tiles; ++i) sum += x[i * 2] * x[i * 2 + 1];
  y[threadIdx.x] = sum;
}
