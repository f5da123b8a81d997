#include "kernels/swiglu.h"

#include "kernels/device/launch.h"
#include "kernels/device/sigmoid.h"
#include "kernels/device/stream.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kVectors = 2;  // of each operand: four loads in flight forward, six backward

template <class T, int N>
struct Operands {
  Packed<T, N> gate, up, dh;
};

template <class T, int N>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    swiglu_forward_kernel(T* h, const T* gate_up, int64_t rows, int columns, Divisor per_row) {
  stream_rows<kVectors>(
      rows, per_row,
      [&](const RowVector& at) {
        const T* const gate = gate_up + at.row * 2 * columns + at.vector * N;
        return Operands<T, N>{load_packed<N>(gate), load_packed<N>(gate + columns), {}};
      },
      [&](const RowVector& at, const Operands<T, N>& in) {
        const Floats<N> gate = in.gate.floats(), up = in.up.floats();
        Floats<N> result;
#pragma unroll
        for (int k = 0; k < N; ++k) result[k] = gate[k] * sigmoid<T>(gate[k]) * up[k];
        store(h + at.row * columns + at.vector * N, result);
      });
}

template <class T, int N>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    swiglu_backward_kernel(T* dgate_up, const T* dh, const T* gate_up, T* h, int64_t rows, int columns,
                           Divisor per_row) {
  stream_rows<kVectors>(
      rows, per_row,
      [&](const RowVector& at) {
        const T* const gate = gate_up + at.row * 2 * columns + at.vector * N;
        return Operands<T, N>{load_packed<N>(gate), load_packed<N>(gate + columns),
                              load_packed<N>(dh + at.row * columns + at.vector * N)};
      },
      [&](const RowVector& at, const Operands<T, N>& in) {
        const Floats<N> gate = in.gate.floats(), up = in.up.floats(), gradient = in.dh.floats();
        Floats<N> dgate, dup, product;
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float s = sigmoid<T>(gate[k]), silu = gate[k] * s;
          dgate[k] = gradient[k] * up[k] * silu_slope(gate[k], s);
          dup[k] = gradient[k] * silu;
          product[k] = silu * up[k];
        }
        T* const to = dgate_up + at.row * 2 * columns + at.vector * N;
        store(to, dgate);
        store(to + columns, dup);
        if (h != nullptr) store(h + at.row * columns + at.vector * N, product);
      });
}

}  // namespace

void swiglu_forward(const SwigluForward& a, cudaStream_t stream) {
  if (a.rows == 0 || a.columns == 0) return;
  dispatch(a.dtype, access_bytes({a.h, a.gate_up}, a.columns * size_of(a.dtype)), [&]<class T, int N>() {
    const Divisor per_row(static_cast<uint32_t>(a.columns / N));
    launch("swiglu_forward", swiglu_forward_kernel<T, N>,
           {.grid = blocks_for(a.rows * per_row.value(), kStreamThreads * kVectors),
            .block = kStreamThreads,
            .stream = stream},
           static_cast<T*>(a.h), static_cast<const T*>(a.gate_up), a.rows, a.columns, per_row);
  });
}

void swiglu_backward(const SwigluBackward& a, cudaStream_t stream) {
  if (a.rows == 0 || a.columns == 0) return;
  const int access = access_bytes({a.dgate_up, a.dh, a.gate_up, a.h}, a.columns * size_of(a.dtype));
  dispatch(a.dtype, access, [&]<class T, int N>() {
    const Divisor per_row(static_cast<uint32_t>(a.columns / N));
    launch("swiglu_backward", swiglu_backward_kernel<T, N>,
           {.grid = blocks_for(a.rows * per_row.value(), kStreamThreads * kVectors),
            .block = kStreamThreads,
            .stream = stream},
           static_cast<T*>(a.dgate_up), static_cast<const T*>(a.dh), static_cast<const T*>(a.gate_up),
           static_cast<T*>(a.h), a.rows, a.columns, per_row);
  });
}

// exp, divide and negate count as one operation each.
Cost swiglu_forward_cost(int64_t rows, int columns, DType dtype) {
  return {.bytes = 3 * rows * columns * size_of(dtype), .flops = 6 * rows * columns};
}

Cost swiglu_backward_cost(int64_t rows, int columns, DType dtype, bool with_h) {
  return {.bytes = (with_h ? 6 : 5) * rows * columns * size_of(dtype),
          .flops = (with_h ? 13 : 12) * rows * columns};
}

}  // namespace minillm::kernels
