// The PTX instructions that CUDA C++ has no words for: inline assembly for nvcc, an emulation beside it for
// the simulated device, written from the PTX ISA's tables of fragment layouts. Everything here needs sm_80.
//
// Instructions marked "warp" are executed by all 32 lanes of a warp together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/device/fragments.h"
#include "kernels/device/vec.h"

namespace minillm::kernels {

#if defined(__CUDACC__)
/// What instructions on shared memory take as an address.
__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
#endif

// Matrices of 8 × 8 elements of 16 bits
// ---------------------------------------------------------------------------------------------

/// ldmatrix (warp): loads kMatrices (1, 2 or 4) 8 × 8 matrices of bf16 from shared memory. Lane 8i + r gives
/// the address of row r of matrix i, 8 elements at a multiple of 16 bytes; other lanes' addresses are
/// ignored. fragment[i] of lane l holds elements 2(l % 4) and 2(l % 4) + 1, the first in the lower half, of
/// row l / 4 of matrix i; with kTransposed, of column l / 4.
template <int kMatrices, bool kTransposed = false>
__device__ inline void load_matrices(uint32_t (&fragment)[kMatrices], const void* row) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4);
#if defined(__CUDACC__)
  const uint32_t address = shared_address(row);
  if constexpr (kMatrices == 1 && !kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(fragment[0]) : "r"(address));
  } else if constexpr (kMatrices == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(fragment[0])
                 : "r"(address));
  } else if constexpr (kMatrices == 2 && !kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(address));
  } else if constexpr (kMatrices == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(fragment[0]), "=r"(fragment[1])
                 : "r"(address));
  } else if constexpr (!kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address));
  }
#else
  const uint64_t* rows = sim::lane_values("ldmatrix", reinterpret_cast<uintptr_t>(row));
  const int lane = static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  const auto row_of = [rows](int r) { return sim::matrix_row(rows[r]); };
  for (int i = 0; i < kMatrices; ++i) fragment[i] = matrix_word<kTransposed>(row_of, i, lane);
#endif
}

#if !defined(__CUDACC__)
/// What a lane brings to a product: kBlocks fragments of A, kTiles of B, and room for their results.
struct FragmentProduct {
  const uint32_t* a;  ///< [kBlocks][4]
  const uint32_t* b;  ///< [kTiles][2]
  float* d;           ///< [kBlocks][kTiles][4]
};

/// Gives each lane its part of A · B.
template <int kBlocks, int kTiles>
SIM_INVISIBLE void multiply_fragments(void* const* lanes) {
  alignas(16) float a[16][16], b[16][8 * kTiles], d[16][8 * kTiles];
  const uint32_t* words[32];
  for (int lane = 0; lane < 32; ++lane) words[lane] = static_cast<const FragmentProduct*>(lanes[lane])->b;
  unpack_columns<kTiles>(b, words);
  for (int r = 0; r < kBlocks; ++r) {
    for (int lane = 0; lane < 32; ++lane)
      words[lane] = static_cast<const FragmentProduct*>(lanes[lane])->a + 4 * r;
    unpack_rows(a, words);
    multiply<kTiles, false>(d, a, b);
    for (int lane = 0; lane < 32; ++lane) {
      float* const to = static_cast<const FragmentProduct*>(lanes[lane])->d + r * kTiles * 4;
      for (int n = 0; n < kTiles; ++n)
        for (int i = 0; i < 4; ++i) to[4 * n + i] = d[result_row(lane, i)][8 * n + result_column(lane, i)];
    }
  }
}
#endif

/// mma.sync.m16n8k16 (warp): d = c + A · B for A [16, 16] and B [16, 8] of bf16, accumulated in fp32. With
/// group = lane / 4 and pair = 2 (lane % 4), a lane holds
///   A  a[0]: row group,     columns pair, pair + 1     a[2]: the same rows as a[0] and a[1],
///      a[1]: row group + 8, columns pair, pair + 1     a[3]: columns pair + 8, pair + 9
///   B  b0: rows pair, pair + 1 of column group         b1: rows pair + 8, pair + 9
///   D  d[0], d[1]: row group, columns pair, pair + 1   d[2], d[3]: row group + 8
/// so that two D fragments side by side, packed to bf16, are an A fragment.
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    const float (&c)[4]) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
        "f"(c[3]));
#else
  const uint32_t b[] = {b0, b1};
  float product[4];
  FragmentProduct mine{a, b, product};
  sim::warp_compute("mma.sync", multiply_fragments<1, 1>, &mine);
  for (int i = 0; i < 4; ++i) d[i] = c[i] + product[i];
#endif
}

/// d[r][j] and d[r][j + 1], for each r, = A_r · B + what they are unless `first`: as many mma as there are
/// results, B being [16, 16] as two fragments side by side. The simulated device does it at one meeting of
/// the warp.
template <int kBlocks, int kTiles>
__device__ inline void multiply_add(float (&d)[kBlocks][kTiles][4], int j, const uint32_t (&a)[kBlocks][4],
                                    const uint32_t (&b)[4], bool first) {
  constexpr float kZero[4] = {};
#if defined(__CUDACC__)
#pragma unroll
  for (int r = 0; r < kBlocks; ++r)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (first)
        multiply_add(d[r][j + n], a[r], b[2 * n], b[2 * n + 1], kZero);
      else
        multiply_add(d[r][j + n], a[r], b[2 * n], b[2 * n + 1], d[r][j + n]);
#else
  float product[8 * kBlocks];
  FragmentProduct mine{a[0], b, product};
  sim::warp_compute("mma.sync", multiply_fragments<kBlocks, 2>, &mine);
  for (int r = 0; r < kBlocks; ++r)
    for (int n = 0; n < 2; ++n)
      for (int i = 0; i < 4; ++i)
        d[r][j + n][i] = (first ? kZero[i] : d[r][j + n][i]) + product[8 * r + 4 * n + i];
#endif
}

/// `low` and `high` rounded to bf16 in the halves of a register.
__device__ inline uint32_t pack_bf16(float low, float high) {
#if defined(__CUDACC__)
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#else
  return sim::bfloat16_bits(low) | uint32_t{sim::bfloat16_bits(high)} << 16;
#endif
}

// Asynchronous copies
// -----------------------------------------------------------------------------------------------------------

/// cp.async: starts a copy of kBytes (4, 8 or 16) from device to shared memory, both aligned to kBytes;
/// writes zeros and reads nothing unless `exists`. The copy may happen at any time until wait_copies() has
/// waited for its group, and then only this thread may rely on it: others after a barrier. 16 bytes go around
/// the L1 cache.
template <int kBytes>
__device__ inline void copy_async(void* shared, const void* global, bool exists) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#if defined(__CUDACC__)
  const uint32_t to = shared_address(shared);
  const uint64_t from = __cvta_generic_to_global(global);
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(exists ? kBytes : 0)
                 : "memory");
#else
  sim::async_copy(shared, global, kBytes, exists);
#endif
}

/// Makes a group of the copies that this thread started since the last call; it may be empty.
__device__ inline void commit_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  sim::async_commit();
#endif
}

/// Waits until at most the latest kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void wait_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#else
  sim::async_wait(kPending);
#endif
}

// Arithmetic
// --------------------------------------------------------------------------------------------------------

/// ex2.approx.ftz: 2^x with a relative error of at most 2^-22; results below 2^-126 are 0. 2^-inf = 0.
__device__ inline float exp2_approx(float x) {
#if defined(__CUDACC__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = exp2f(x);
  return result < 0x1p-126f ? 0.0f : result;
#endif
}

/// rcp.approx.ftz: 1 / x to a unit in the last place, 0 where the result would be a denormal: one
/// instruction. CUDA's __fdividef adds several that handle denormals.
__device__ inline float reciprocal_approx(float x) {
#if defined(__CUDACC__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = 1.0f / x;
  return fabsf(result) < 0x1p-126f ? 0.0f : result;
#endif
}

/// max.bf16x2: the larger of each half. NaN loses against a number, as with fmaxf.
__device__ inline uint32_t max_bf16(uint32_t a, uint32_t b) {
#if defined(__CUDACC__)
  uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#else
  const auto value = [](uint32_t bits) { return __builtin_bit_cast(float, bits); };
  return pack_bf16(fmaxf(value(a << 16), value(b << 16)),
                   fmaxf(value(a & 0xffff0000u), value(b & 0xffff0000u)));
#endif
}

/// Makes the compiler forget what it knows of `value`: what follows from it is computed where it is used, not
/// ahead of a loop at the price of registers for the whole loop.
__device__ inline void forget(int& value) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(value));
#else
  (void)value;
#endif
}

// Accesses of what is touched once and should not push out of the caches what is touched again
// --------------------------------------------------------------------------------------------------------

/// What an access of kBytes moves.
template <size_t kBytes>
using StreamedWord = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

/// As load_packed.
template <int N, class T>
__device__ inline Packed<T, N> load_streaming(const T* from) {
#if defined(__CUDACC__)
  using Word = StreamedWord<sizeof(Packed<T, N>)>;
  Packed<T, N> result;
  reinterpret_cast<Word&>(result) = __ldcs(reinterpret_cast<const Word*>(from));
  return result;
#else
  return load_packed<N>(from);
#endif
}

/// As store_packed().
template <class T, int N>
__device__ inline void store_streaming(T* to, const Packed<T, N>& values) {
#if defined(__CUDACC__)
  using Word = StreamedWord<sizeof(values)>;
  __stcs(reinterpret_cast<Word*>(to), reinterpret_cast<const Word&>(values));
#else
  store_packed(to, values);
#endif
}

}  // namespace minillm::kernels
