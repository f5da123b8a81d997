#include "kernels/accumulate.h"

#include "kernels/cast.h"
#include "kernels/device/launch.h"
#include "kernels/device/stream.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kVectors = 4;

template <class In, int M>
struct Operands {
  Packed<float, M> out;
  Packed<In, M> in;
};

template <class In, int N>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    accumulate_kernel(float* out, const In* in, int64_t count) {
  stream_vectors<N, kVectors>(
      count,
      [&]<int M>(int64_t i) {
        return Operands<In, M>{load_packed<M>(out + i), load_packed<M>(in + i)};
      },
      [&]<int M>(int64_t i, const Operands<In, M>& loaded) {
        Floats<M> sum = loaded.out.floats();
        const Floats<M> added = loaded.in.floats();
#pragma unroll
        for (int k = 0; k < M; ++k) sum[k] += added[k];
        store(out + i, sum);
      });
}

}  // namespace

void accumulate(const Accumulate& a, cudaStream_t stream) {
  if (!a.accumulate)
    return cast({.out = a.out, .in = a.in, .count = a.count, .out_type = DType::kFp32, .in_type = a.in_type},
                stream);
  const int elements = aligned_elements({{a.out, 4}, {a.in, size_of(a.in_type)}});
  dispatch(a.in_type, [&]<class In>() {
    const auto run = [&]<int N>() {
      launch("accumulate", accumulate_kernel<In, N>,
             {.grid = stream_blocks<N, kVectors>(a.count), .block = kStreamThreads, .stream = stream}, a.out,
             static_cast<const In*>(a.in), a.count);
    };
    if (elements >= kFullWidth<float>)
      run.template operator()<kFullWidth<float>>();
    else
      run.template operator()<1>();
  });
}

Cost accumulate_cost(const Accumulate& a) {
  return {.bytes = a.count * (size_of(a.in_type) + (a.accumulate ? 8 : 4)),
          .flops = a.accumulate ? a.count : 0};
}

}  // namespace minillm::kernels
