#include "kernels/cast.h"

#include <algorithm>

#include "kernels/device/launch.h"
#include "kernels/device/stream.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kVectors = 4;

template <class Out, class In, int N>
__global__ void __launch_bounds__(kStreamThreads, kStreamBlocks)
    cast_kernel(Out* out, const In* in, int64_t count) {
  stream_vectors<N, kVectors>(
      count, [&]<int M>(int64_t i) { return load_packed<M>(in + i); },
      [&]<int M>(int64_t i, const Packed<In, M>& loaded) { store(out + i, loaded.floats()); });
}

template <class Out, class In, int N>
void launch_cast(const Cast& a, cudaStream_t stream) {
  launch("cast", cast_kernel<Out, In, N>,
         {.grid = stream_blocks<N, kVectors>(a.count), .block = kStreamThreads, .stream = stream},
         static_cast<Out*>(a.out), static_cast<const In*>(a.in), a.count);
}

}  // namespace

void cast(const Cast& a, cudaStream_t stream) {
  const int elements = aligned_elements({{a.out, size_of(a.out_type)}, {a.in, size_of(a.in_type)}});
  dispatch(a.out_type, [&]<class Out>() {
    dispatch(a.in_type, [&]<class In>() {
      constexpr int kWidth = std::min(kFullWidth<Out>, kFullWidth<In>);
      if (elements >= kWidth)
        launch_cast<Out, In, kWidth>(a, stream);
      else if (elements >= 2)
        launch_cast<Out, In, 2>(a, stream);
      else
        launch_cast<Out, In, 1>(a, stream);
    });
  });
}

Cost cast_cost(const Cast& a) {
  return {.bytes = a.count * (size_of(a.out_type) + size_of(a.in_type)), .flops = 0};
}

}  // namespace minillm::kernels
