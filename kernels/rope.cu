#include "kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "core/checked.h"
#include "kernels/device/launch.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kHeadsPerThread = 4;  // that share one read of the table, and are in flight together

/// (cos, sin) of N neighbouring angles.
template <int N>
struct Angles {
  float cosine[N], sine[N];

  __device__ Angles(const float2* table, bool inverse) {
    constexpr int kPairs = N > 1 ? 2 : 1;  // of one access
#pragma unroll
    for (int i = 0; i < N; i += kPairs) {
      const Floats<2 * kPairs> v = load<2 * kPairs>(&table[i].x);
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        cosine[i + k] = v[2 * k];
        sine[i + k] = inverse ? -v[2 * k + 1] : v[2 * k + 1];
      }
    }
  }
};

/// A block per token. A thread turns N pairs of each of up to kHeadsPerThread heads, `groups` heads apart, so
/// that neighbouring threads work on neighbouring heads. `heads` counts those of q and of k, which lie one
/// after the other.
template <class T, int N>
__global__ void __launch_bounds__(kMaxThreads)
    rope_kernel(T* qkv, const float2* table, int sequence, int heads, int half, bool inverse) {
  const int64_t token = blockIdx.x;
  const int position = static_cast<int>(token % sequence);
  const int vectors = half / N, groups = (heads + kHeadsPerThread - 1) / kHeadsPerThread;
  T* const of_token = qkv + token * (heads / 2 * 3) * (2 * half);
  for (int item = threadIdx.x; item < groups * vectors; item += blockDim.x) {
    const int first_head = item / vectors, pair = item % vectors * N;
    const Angles<N> angle(table + int64_t{position} * half + pair, inverse);
    Packed<T, N> low[kHeadsPerThread], high[kHeadsPerThread];
#pragma unroll
    for (int h = 0; h < kHeadsPerThread; ++h) {
      const int head = first_head + h * groups;
      if (head >= heads) continue;
      const T* const from = of_token + int64_t{head} * (2 * half) + pair;
      low[h] = load_packed<N>(from);
      high[h] = load_packed<N>(from + half);
    }
#pragma unroll
    for (int h = 0; h < kHeadsPerThread; ++h) {
      const int head = first_head + h * groups;
      if (head >= heads) continue;
      const Floats<N> x = low[h].floats(), y = high[h].floats();
      Floats<N> turned_x, turned_y;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        turned_x[k] = x[k] * angle.cosine[k] - y[k] * angle.sine[k];
        turned_y[k] = y[k] * angle.cosine[k] + x[k] * angle.sine[k];
      }
      T* const to = of_token + int64_t{head} * (2 * half) + pair;
      store(to, turned_x);
      store(to + half, turned_y);
    }
  }
}

}  // namespace

std::vector<float2> rope_table(int sequence, int head_size, double theta) {
  const int half = head_size / 2;
  std::vector<float2> table(int64_t{sequence} * half);
  for (int i = 0; i < half; ++i) {
    const double frequency = std::pow(theta, -2.0 * i / head_size);
    for (int position = 0; position < sequence; ++position) {
      const double angle = position * frequency;
      table[int64_t{position} * half + i] =
          make_float2(static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

void rope(const Rope& a, cudaStream_t stream) {
  const int half = a.head_size / 2;
  dispatch(a.dtype, can_vectorize({a.qkv, a.table}, half * size_of(a.dtype)), [&]<class T, int N>() {
    const int64_t items = ceil_div(2 * a.heads, kHeadsPerThread) * (half / N);
    const auto threads = static_cast<unsigned>(std::clamp<int64_t>(round_up(items, 32), 32, kMaxThreads));
    launch("rope", rope_kernel<T, N>,
           {.grid = static_cast<unsigned>(a.batch * a.sequence), .block = threads, .stream = stream},
           static_cast<T*>(a.qkv), a.table, a.sequence, 2 * a.heads, half, a.inverse);
  });
}

Cost rope_cost(int64_t batch, int sequence, int heads, int head_size, DType dtype) {
  const int64_t elements = batch * sequence * 2 * heads * head_size;
  return {.bytes = 2 * elements * size_of(dtype) + int64_t{sequence} * head_size * 4, .flops = 3 * elements};
}

}  // namespace minillm::kernels
