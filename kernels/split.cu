#include "kernels/split.h"

#include "core/split_float.h"
#include "kernels/device/launch.h"
#include "kernels/device/stream.h"

namespace minillm::kernels {
namespace {

__global__ void __launch_bounds__(kStreamThreads)
    split_kernel(uint16_t* upper, uint16_t* lower, const float* in, int64_t count) {
  stream_vectors<1, 1>(
      count, [&]<int M>(int64_t i) { return in[i]; },
      [&]<int M>(int64_t i, float value) {
        const SplitFloat halves = split_float(__float_as_uint(value));
        upper[i] = halves.upper;
        lower[i] = halves.lower;
      });
}

}  // namespace

void split(const Split& a, cudaStream_t stream) {
  launch("split", split_kernel,
         {.grid = stream_blocks<1, 1>(a.count), .block = kStreamThreads, .stream = stream}, a.upper, a.lower,
         a.in, a.count);
}

}  // namespace minillm::kernels
