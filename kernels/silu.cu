#include "kernels/silu.h"

#include <type_traits>

#include "kernels/device/launch.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kThreads = 256;

/// With bf16 the approximations' few units of fp32 vanish in the rounding, while exact ones would make the
/// arithmetic, not the memory, the limit. Large negative u: exp is infinite and the quotient 0.
template <class T>
__device__ float sigmoid(float u) {
  if constexpr (std::is_same_v<T, float>)
    return 1.0f / (1.0f + expf(-u));
  else
    return __fdividef(1.0f, 1.0f + __expf(-u));
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) silu_forward_kernel(T* y, const T* u, int64_t count) {
  for_vector_of_thread<N>(count, [&]<int M>(int64_t i) {
    Floats<M> v = load<M>(u + i);
#pragma unroll
    for (int k = 0; k < M; ++k) v[k] *= sigmoid<T>(v[k]);
    store(y + i, v);
  });
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads)
    silu_backward_kernel(T* du, const T* dy, const T* u, int64_t count) {
  for_vector_of_thread<N>(count, [&]<int M>(int64_t i) {
    const Floats<M> v = load<M>(u + i);
    Floats<M> gradient = load<M>(dy + i);
#pragma unroll
    for (int k = 0; k < M; ++k) {
      const float s = sigmoid<T>(v[k]);
      gradient[k] *= s * (1.0f + v[k] * (1.0f - s));
    }
    store(du + i, gradient);
  });
}

}  // namespace

void silu_forward(const SiluForward& a, cudaStream_t stream) {
  dispatch(a.dtype, can_vectorize({a.y, a.u}), [&]<class T, int N>() {
    launch("silu_forward", silu_forward_kernel<T, N>,
           {.grid = vector_blocks(a.count, N, kThreads), .block = kThreads, .stream = stream},
           static_cast<T*>(a.y), static_cast<const T*>(a.u), a.count);
  });
}

void silu_backward(const SiluBackward& a, cudaStream_t stream) {
  dispatch(a.dtype, can_vectorize({a.du, a.dy, a.u}), [&]<class T, int N>() {
    launch("silu_backward", silu_backward_kernel<T, N>,
           {.grid = vector_blocks(a.count, N, kThreads), .block = kThreads, .stream = stream},
           static_cast<T*>(a.du), static_cast<const T*>(a.dy), static_cast<const T*>(a.u), a.count);
  });
}

// exp, divide and negate count as one operation each.
Cost silu_forward_cost(int64_t count, DType dtype) {
  return {.bytes = 2 * count * size_of(dtype), .flops = 5 * count};
}

Cost silu_backward_cost(int64_t count, DType dtype) {
  return {.bytes = 3 * count * size_of(dtype), .flops = 9 * count};
}

}  // namespace minillm::kernels
