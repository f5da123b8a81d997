#include "kernels/initialize.h"

#include "core/philox.h"
#include "kernels/device/launch.h"

namespace minillm::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 4;  // of one Philox counter: one for each element

/// Box-Muller: two words make two values. The uniform of the logarithm has 32 bits and is never 0, so values
/// reach 6.7 standard deviations.
__device__ void normal_pair(uint32_t radius_bits, uint32_t angle_bits, float* values) {
  const float u = fmaf(static_cast<float>(radius_bits), 0x1p-32f, 0x1p-33f);
  const float radius = sqrtf(-2.0f * logf(u));
  float sine, cosine;
  sincospif(2.0f * uniform_from_bits(angle_bits), &sine, &cosine);
  values[0] = radius * cosine;
  values[1] = radius * sine;
}

__device__ void draw(const PhiloxWords& words, Distribution distribution, float a, float* values) {
  if (distribution == Distribution::kNormal) {
    normal_pair(words.word[0], words.word[1], values);
    normal_pair(words.word[2], words.word[3], values + 2);
#pragma unroll
    for (int k = 0; k < kWords; ++k) values[k] *= a;
  } else {
#pragma unroll
    for (int k = 0; k < kWords; ++k) values[k] = a * (2.0f * uniform_from_bits(words.word[k]) - 1.0f);
  }
}

__global__ void __launch_bounds__(kThreads) fill_kernel(float* out, int64_t count, float value) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) out[i] = value;
}

/// A thread per counter that has an element in the range; at its ends some of the four are left out.
__global__ void __launch_bounds__(kThreads) random_kernel(Initialize args, int64_t counters) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread >= counters) return;
  const int64_t counter = args.first / kWords + thread;
  float values[kWords];
  draw(philox(args.seed, args.stream, static_cast<uint64_t>(counter)), args.distribution, args.a, values);
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    const int64_t i = counter * kWords + k - args.first;
    if (i >= 0 && i < args.count) args.out[i] = values[k];
  }
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

}  // namespace

void initialize(const Initialize& a, cudaStream_t stream) {
  if (a.count == 0) return;
  if (a.distribution == Distribution::kConstant) {
    launch("initialize_constant", fill_kernel,
           {.grid = blocks_for(a.count), .block = kThreads, .stream = stream}, a.out, a.count, a.a);
    return;
  }
  const int64_t counters = (a.first + a.count - 1) / kWords - a.first / kWords + 1;
  launch("initialize_random", random_kernel,
         {.grid = blocks_for(counters), .block = kThreads, .stream = stream}, a, counters);
}

}  // namespace minillm::kernels
