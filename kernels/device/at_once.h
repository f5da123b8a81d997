// Shortcuts of the simulated device: what a warp does by many instructions, each a meeting of its lanes, done
// at one meeting with the same bits. Meetings are what its time goes into.
//
// meets_at_once() says whether to take them: never on a GPU, where nothing of this remains in the code; not
// in other orders of threads than the forward one and not under ThreadSanitizer, so that the instructions
// themselves are run as well and the repeatability tests compare both.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/device/fragments.h"

namespace minillm::kernels {

#if defined(__CUDACC__)

__device__ constexpr bool meets_at_once() {
  return false;
}
template <class Combine>
__device__ void reduce_lanes(float&) {}
template <int, int, int, int, bool>
__device__ void multiply_tile(float*, const uint32_t*, const __nv_bfloat16*, int) {}

#else

inline bool meets_at_once() {
  return sim::meets_at_once();
}

/// `value` becomes what reduce.h's warp_reduce makes of the lanes' values.
template <class Combine>
void reduce_lanes(float& value) {
  static_assert(std::is_empty_v<Combine>);
  const sim::WarpFunction compute = [](void* const* lanes) {
    float values[2][32];
    for (int i = 0; i < 32; ++i) values[0][i] = *static_cast<const float*>(lanes[i]);
    int from = 0;
    for (int distance = 16; distance > 0; distance /= 2, from ^= 1)
      for (int i = 0; i < 32; ++i)
        values[from ^ 1][i] = Combine{}(values[from][i], values[from][i ^ distance]);
    for (int i = 0; i < 32; ++i) *static_cast<float*>(lanes[i]) = values[from][i];
  };
  sim::warp_compute("__shfl_xor_sync", compute, &value);
}

/// What a lane brings to multiply_tile().
struct TileProduct {
  float* sum;         ///< [kBlocks][kColumns / 8][4]
  const uint32_t* a;  ///< [kSteps][kBlocks][4]
  const __nv_bfloat16* tile;
  int lane;

  /// Where the lane reads, with ldmatrix, the block of the tile that step k and columns j.. multiply with.
  template <int D, bool kTransposed>
  const std::byte* block(int k, int j) const {
    const int offset = kTransposed ? k * 16 * D + (lane ^ j) : (lane ^ k * 16) + j * D;
    return sim::matrix_row(reinterpret_cast<uint64_t>(tile + offset));
  }
};

/// sum[r] += A_r · B of kColumns columns for kBlocks row blocks, of which A's fragments are `a` and B's those
/// that mma_tile.h loads: from rows of the tile (kTransposed) or, as product_with_rows does, from columns.
template <int D, int kSteps, int kColumns, int kBlocks, bool kTransposed>
void multiply_tile(float* sum, const uint32_t* a, const __nv_bfloat16* tile, int lane) {
  const sim::WarpFunction compute = [](void* const* lanes) {
    const auto of = [lanes](int l) -> const TileProduct& { return *static_cast<TileProduct*>(lanes[l]); };
    alignas(64) float rows[kSteps][kBlocks][16][16], columns[kSteps][16][16], d[16][16];
    const uint32_t* words[32];
    for (int k = 0; k < kSteps; ++k)
      for (int r = 0; r < kBlocks; ++r) {
        for (int l = 0; l < 32; ++l) words[l] = of(l).a + (k * kBlocks + r) * 4;
        unpack_rows(rows[k][r], words);
      }
    for (int j = 0; j < kColumns; j += 16) {
      for (int k = 0; k < kSteps; ++k) {
        const std::byte* row[32];
        uint32_t fragment[32][4];
        for (int l = 0; l < 32; ++l) row[l] = of(l).template block<D, kTransposed>(k, j);
        for (int l = 0; l < 32; ++l) {
          for (int i = 0; i < 4; ++i)
            fragment[l][i] = matrix_word<kTransposed>([&row](int r) { return row[r]; }, i, l);
          words[l] = fragment[l];
        }
        unpack_columns<2>(columns[k], words);
      }
      const auto for_each_result = [&](int r, const auto& visit) {
        for (int n = 0; n < 2; ++n)
          for (int l = 0; l < 32; ++l)
            for (int i = 0; i < 4; ++i)
              visit(of(l).sum[(r * (kColumns / 8) + j / 8 + n) * 4 + i],
                    d[result_row(l, i)][8 * n + result_column(l, i)]);
      };
      for (int r = 0; r < kBlocks; ++r) {
        for_each_result(r, [](float& lanes_part, float& element) { element = lanes_part; });
        for (int k = 0; k < kSteps; ++k) multiply<2, true>(d, rows[k][r], columns[k]);
        for_each_result(r, [](float& lanes_part, float& element) { lanes_part = element; });
      }
    }
  };
  TileProduct mine{sum, a, tile, lane};
  sim::warp_compute("mma.sync", compute, &mine);
}

#endif

}  // namespace minillm::kernels
