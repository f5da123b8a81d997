#include "kernels/cast.h"

#include <algorithm>

#include "kernels/device/launch.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {
namespace {

constexpr int kThreads = 256;

template <class Out, class In, int N>
__global__ void __launch_bounds__(kThreads) cast_kernel(Out* out, const In* in, int64_t count) {
  for_vector_of_thread<N>(count, [&]<int M>(int64_t i) { store(out + i, load<M>(in + i)); });
}

template <class Out, class In, int N>
void launch_cast(const Cast& a, cudaStream_t stream) {
  launch("cast", cast_kernel<Out, In, N>,
         {.grid = vector_blocks(a.count, N, kThreads), .block = kThreads, .stream = stream},
         static_cast<Out*>(a.out), static_cast<const In*>(a.in), a.count);
}

}  // namespace

void cast(const Cast& a, cudaStream_t stream) {
  dispatch(a.out_type, [&]<class Out>() {
    dispatch(a.in_type, [&]<class In>() {
      if (can_vectorize({a.out, a.in}))
        launch_cast<Out, In, std::min(kFullWidth<Out>, kFullWidth<In>)>(a, stream);
      else
        launch_cast<Out, In, 1>(a, stream);
    });
  });
}

Cost cast_cost(const Cast& a) {
  return {.bytes = a.count * (size_of(a.out_type) + size_of(a.in_type)), .flops = 0};
}

}  // namespace minillm::kernels
