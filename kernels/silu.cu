#include "kernels/silu.h"

#include "kernels/device/launch.h"
#include "kernels/device/sigmoid.h"
#include "kernels/device/stream.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

// Four accesses of a thread in flight: more bytes than latency times bandwidth asks for on any GPU.
constexpr int kForwardVectors = 4, kBackwardVectors = 2;

template <class T, int N>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    silu_forward_kernel(T* y, const T* u, int64_t count) {
  stream_vectors<N, kForwardVectors>(
      count, [&]<int M>(int64_t i) { return load_packed<M>(u + i); },
      [&]<int M>(int64_t i, const Packed<T, M>& loaded) {
        Floats<M> v = loaded.floats();
#pragma unroll
        for (int k = 0; k < M; ++k) v[k] *= sigmoid<T>(v[k]);
        store(y + i, v);
      });
}

template <class T, int M>
struct BackwardOperands {
  Packed<T, M> dy, u;
};

template <class T, int N>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    silu_backward_kernel(T* du, const T* dy, const T* u, int64_t count) {
  stream_vectors<N, kBackwardVectors>(
      count,
      [&]<int M>(int64_t i) {
        return BackwardOperands<T, M>{load_packed<M>(dy + i), load_packed<M>(u + i)};
      },
      [&]<int M>(int64_t i, const BackwardOperands<T, M>& loaded) {
        Floats<M> gradient = loaded.dy.floats();
        const Floats<M> v = loaded.u.floats();
#pragma unroll
        for (int k = 0; k < M; ++k) gradient[k] *= silu_slope(v[k], sigmoid<T>(v[k]));
        store(du + i, gradient);
      });
}

}  // namespace

void silu_forward(const SiluForward& a, cudaStream_t stream) {
  dispatch(a.dtype, access_bytes({a.y, a.u}), [&]<class T, int N>() {
    launch("silu_forward", silu_forward_kernel<T, N>,
           {.grid = stream_blocks<N, kForwardVectors>(a.count), .block = kStreamThreads, .stream = stream},
           static_cast<T*>(a.y), static_cast<const T*>(a.u), a.count);
  });
}

void silu_backward(const SiluBackward& a, cudaStream_t stream) {
  dispatch(a.dtype, access_bytes({a.du, a.dy, a.u}), [&]<class T, int N>() {
    launch("silu_backward", silu_backward_kernel<T, N>,
           {.grid = stream_blocks<N, kBackwardVectors>(a.count), .block = kStreamThreads, .stream = stream},
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
