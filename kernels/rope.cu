#include "kernels/rope.h"

#include <cmath>

#include "core/checked.h"
#include "kernels/device/launch.h"
#include "kernels/device/stream.h"
#include "kernels/device/tiling.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

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

/// What a launch works on.
struct RopeLayout {
  int64_t positions;  ///< batch · sequence
  int sequence;
  int rotated;  ///< heads of q and k, which lie one after the other
  int heads;    ///< of a position, those of v included
  int half;     ///< of head_size
  int groups;   ///< of rotated heads
  Divisor batch;
  Divisor vectors;  ///< of half a head
  Divisor items;    ///< groups · vectors: of a position
};

/// A thread turns N pairs of each of up to kHeadsPerThread heads, `groups` heads apart, so that neighbouring
/// threads work on neighbouring heads. Items go through the batch before the next position, so that memory
/// gives up the table once.
template <class T, int N>
__global__ void __launch_bounds__(kStreamThreads)
    rope_kernel(T* qkv, const float2* table, RopeLayout a, bool inverse) {
  const RowVector item =
      row_vector_after(row_vector(int64_t{blockIdx.x} * kStreamThreads, a.items), threadIdx.x, a.items);
  if (item.row >= a.positions) return;
  const uint32_t position = a.batch.quotient(static_cast<uint32_t>(item.row));
  const int64_t sequence = item.row - int64_t{position} * a.batch.value();
  const int first_head = static_cast<int>(a.vectors.quotient(item.vector));
  const int pair = (static_cast<int>(item.vector) - first_head * static_cast<int>(a.vectors.value())) * N;
  T* const heads = qkv + (sequence * a.sequence + position) * a.heads * (2 * a.half) + pair;

  const Angles<N> angle(table + int64_t{position} * a.half + pair, inverse);
  Packed<T, N> low[kHeadsPerThread], high[kHeadsPerThread];
#pragma unroll
  for (int h = 0; h < kHeadsPerThread; ++h) {
    const int head = first_head + h * a.groups;
    if (head >= a.rotated) continue;
    const T* const from = heads + int64_t{head} * (2 * a.half);
    low[h] = load_packed<N>(from);
    high[h] = load_packed<N>(from + a.half);
  }
#pragma unroll
  for (int h = 0; h < kHeadsPerThread; ++h) {
    const int head = first_head + h * a.groups;
    if (head >= a.rotated) continue;
    const Floats<N> x = low[h].floats(), y = high[h].floats();
    Floats<N> turned_x, turned_y;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      // Written out: the compiler might fuse the one product here and the other for another N.
      turned_x[k] = fmaf(x[k], angle.cosine[k], -(y[k] * angle.sine[k]));
      turned_y[k] = fmaf(y[k], angle.cosine[k], x[k] * angle.sine[k]);
    }
    T* const to = heads + int64_t{head} * (2 * a.half);
    store(to, turned_x);
    store(to + a.half, turned_y);
  }
}

int kv_heads_of(int heads, int kv_heads) {
  return kv_heads == 0 ? heads : kv_heads;
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
  if (a.batch == 0 || a.sequence == 0) return;
  const int half = a.head_size / 2, kv_heads = kv_heads_of(a.heads, a.kv_heads);
  const int rotated = a.heads + kv_heads, groups = static_cast<int>(ceil_div(rotated, kHeadsPerThread));
  const int positions = narrow<int>(a.batch * a.sequence);
  // The table is read 16 bytes at a time whenever an access of qkv has more than one element.
  const int access = can_vectorize({a.table}) ? access_bytes({a.qkv}, half * size_of(a.dtype)) : 1;
  dispatch(a.dtype, access, [&]<class T, int N>() {
    const auto vectors = static_cast<uint32_t>(half / N), items = groups * vectors;
    const RopeLayout layout = {.positions = positions,
                               .sequence = a.sequence,
                               .rotated = rotated,
                               .heads = rotated + kv_heads,
                               .half = half,
                               .groups = groups,
                               .batch = Divisor(static_cast<uint32_t>(a.batch)),
                               .vectors = Divisor(vectors),
                               .items = Divisor(items)};
    launch("rope", rope_kernel<T, N>,
           {.grid = blocks_for(int64_t{positions} * items, kStreamThreads),
            .block = kStreamThreads,
            .stream = stream},
           static_cast<T*>(a.qkv), a.table, layout, a.inverse);
  });
}

Cost rope_cost(int64_t batch, int sequence, int heads, int head_size, DType dtype, int kv_heads) {
  const int64_t elements = batch * sequence * (heads + kv_heads_of(heads, kv_heads)) * head_size;
  return {.bytes = 2 * elements * size_of(dtype) + int64_t{sequence} * head_size * 4, .flops = 3 * elements};
}

}  // namespace minillm::kernels
