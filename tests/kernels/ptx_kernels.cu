#include "tests/kernels/ptx_kernels.h"

#include "kernels/device/launch.h"
#include "kernels/device/ptx.h"
#include "kernels/device/shared.h"

namespace minillm::kernels::testing {
namespace {

using Element = __nv_bfloat16;

struct alignas(16) Operands {
  Element a[16 * 16], b[16 * 16], c[16 * 8];
};

__device__ void copy_elements(Element* to, const Element* from, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) to[i] = from[i];
}

/// An A fragment from [16, 16] in shared memory.
__device__ void load_a(uint32_t (&fragment)[4], const Element* a, Load load) {
  const int lane = static_cast<int>(threadIdx.x);
  if (load == Load::kFour) return load_matrices<4>(fragment, a + lane % 16 * 16 + lane / 16 * 8);
  if (load == Load::kTwo) {
    uint32_t left[2], right[2];
    load_matrices<2>(left, a + lane % 16 * 16);
    load_matrices<2>(right, a + lane % 16 * 16 + 8);
    fragment[0] = left[0], fragment[1] = left[1], fragment[2] = right[0], fragment[3] = right[1];
    return;
  }
  for (int i = 0; i < 4; ++i) {
    uint32_t one[1];
    load_matrices<1>(one, a + (lane % 8 + i % 2 * 8) * 16 + i / 2 * 8);
    fragment[i] = one[0];
  }
}

/// A B fragment from [8, 16] or, transposed, [16, 8] in shared memory.
template <bool kTransposed>
__device__ void load_b(uint32_t (&fragment)[2], const Element* b, Load load) {
  const int lane = static_cast<int>(threadIdx.x);
  if (load == Load::kOne) {
    for (int i = 0; i < 2; ++i) {
      uint32_t one[1];
      load_matrices<1, kTransposed>(one,
                                    kTransposed ? b + (lane % 8 + i * 8) * 8 : b + lane % 8 * 16 + i * 8);
      fragment[i] = one[0];
    }
  } else if (load == Load::kTwo) {
    load_matrices<2, kTransposed>(fragment,
                                  kTransposed ? b + lane % 16 * 8 : b + lane % 8 * 16 + lane / 8 % 2 * 8);
  } else {  // the matrices twice
    uint32_t four[4];
    load_matrices<4, kTransposed>(four,
                                  kTransposed ? b + lane % 16 * 8 : b + lane % 8 * 16 + lane / 8 % 2 * 8);
    fragment[0] = four[2], fragment[1] = four[3];
  }
}

__device__ void store_d(float* d, const float (&fragment)[4]) {
  const int group = static_cast<int>(threadIdx.x) / 4, pair = static_cast<int>(threadIdx.x) % 4 * 2;
  for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + pair + i % 2] = fragment[i];
}

__global__ void warp_product_kernel(float* d, const Element* a, const Element* b, bool b_by_rows, Load load) {
  Operands& s = shared<Operands>();
  copy_elements(s.a, a, 16 * 16);
  copy_elements(s.b, b, 16 * 8);
  __syncwarp();
  uint32_t left[4], right[2];
  load_a(left, s.a, load);
  if (b_by_rows)
    load_b<true>(right, s.b, load);
  else
    load_b<false>(right, s.b, load);
  float product[4] = {};
  multiply_add(product, left, right[0], right[1], product);
  store_d(d, product);
}

__global__ void chained_product_kernel(float* d, const Element* a, const Element* b, const Element* c) {
  Operands& s = shared<Operands>();
  copy_elements(s.a, a, 16 * 16);
  copy_elements(s.b, b, 16 * 16);
  copy_elements(s.c, c, 16 * 8);
  __syncwarp();
  uint32_t left[4], right[2];
  load_a(left, s.a, Load::kFour);
  float first[2][4] = {};
  for (int j = 0; j < 2; ++j) {
    load_b<false>(right, s.b + j * 8 * 16, Load::kTwo);
    multiply_add(first[j], left, right[0], right[1], first[j]);
  }
  const uint32_t next[4] = {pack_bf16(first[0][0], first[0][1]), pack_bf16(first[0][2], first[0][3]),
                            pack_bf16(first[1][0], first[1][1]), pack_bf16(first[1][2], first[1][3])};
  load_b<true>(right, s.c, Load::kTwo);
  float product[4] = {};
  multiply_add(product, next, right[0], right[1], product);
  store_d(d, product);
}

template <int kStages>
__global__ void copy_through_stages_kernel(uint4* out, const uint4* in, const bool* exists, int words) {
  struct Stages {
    uint4 word[kStages][32];
  };
  Stages& s = shared<Stages>();
  const int lane = static_cast<int>(threadIdx.x), tiles = words / 32;
  const auto start = [&](int tile) {
    const int i = tile * 32 + lane;
    if (tile < tiles) copy_async<16>(&s.word[tile % kStages][lane], in + i, exists[i]);
    commit_copies();
  };
  for (int tile = 0; tile < kStages - 1; ++tile) start(tile);
  for (int tile = 0; tile < tiles; ++tile) {
    wait_copies<kStages - 2>();
    __syncthreads();  // also: all have read what the next copy overwrites
    start(tile + kStages - 1);
    // Of another lane, so that the barrier is needed.
    const int other = lane ^ 1;
    out[tile * 32 + other] = s.word[tile % kStages][other];
  }
}

struct alignas(16) Landing {
  unsigned char bytes[256];
};

__global__ void copy_misaligned_kernel(uint4* out, const unsigned char* in, int offset) {
  Landing& s = shared<Landing>();
  copy_async<16>(s.bytes + (offset > 0 ? offset : 0), in + (offset < 0 ? -offset : 0), true);
  commit_copies();
  wait_copies<0>();
  *out = *reinterpret_cast<const uint4*>(s.bytes);
}

__global__ void copy_in_groups_kernel(uint4* out, const uint4* in, int groups) {
  Landing& s = shared<Landing>();
  uint4* const words = reinterpret_cast<uint4*>(s.bytes);
  for (int i = 0; i < groups; ++i) {
    copy_async<16>(words + i, in + i, true);
    commit_copies();
  }
  wait_copies<0>();
  for (int i = 0; i < groups; ++i) out[i] = words[i];
}

__global__ void exponentials_kernel(float* out, const float* in, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) out[i] = exp2_approx(in[i]);
}

template <int N>
__global__ void stream_elements_kernel(Element* out, const Element* in, int count) {
  for (int i = static_cast<int>(threadIdx.x) * N; i < count; i += 32 * N)
    store_streaming(out + i, load_streaming<N>(in + i));
}

LaunchShape one_warp() {
  return {.grid = dim3(1), .block = dim3(32)};
}
const Element* elements(const void* pointer) {
  return static_cast<const Element*>(pointer);
}

}  // namespace

void warp_product(float* d, const void* a, const void* b, bool b_by_rows, Load load) {
  launch("warp_product", warp_product_kernel, one_warp(), d, elements(a), elements(b), b_by_rows, load);
}

void chained_product(float* d, const void* a, const void* b, const void* c) {
  launch("chained_product", chained_product_kernel, one_warp(), d, elements(a), elements(b), elements(c));
}

void copy_through_stages(uint4* out, const uint4* in, const bool* exists, int words, int stages) {
  launch("copy_through_stages", stages == 2 ? copy_through_stages_kernel<2> : copy_through_stages_kernel<3>,
         one_warp(), out, in, exists, words);
}

void copy_misaligned(uint4* out, const unsigned char* in, int offset) {
  launch("copy_misaligned", copy_misaligned_kernel, {.grid = dim3(1), .block = dim3(1)}, out, in, offset);
}

void copy_in_groups(uint4* out, const uint4* in, int groups) {
  launch("copy_in_groups", copy_in_groups_kernel, {.grid = dim3(1), .block = dim3(1)}, out, in, groups);
}

void exponentials(float* out, const float* in, int count) {
  launch("exponentials", exponentials_kernel, one_warp(), out, in, count);
}

void stream_elements(void* out, const void* in, int count, int bytes) {
  const auto kernel = bytes == 16  ? stream_elements_kernel<8>
                      : bytes == 8 ? stream_elements_kernel<4>
                      : bytes == 4 ? stream_elements_kernel<2>
                                   : stream_elements_kernel<1>;
  launch("stream_elements", kernel, one_warp(), static_cast<Element*>(out), elements(in), count);
}

}  // namespace minillm::kernels::testing
