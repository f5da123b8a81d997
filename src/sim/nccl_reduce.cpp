#include "sim/nccl_reduce.h"

#include <bit>

namespace nccl_over_mpi {
namespace {

float load(const float* p) {
  return *p;
}
float load(const uint16_t* p) {
  return std::bit_cast<float>(static_cast<uint32_t>(*p) << 16);
}
void store(float* p, float value) {
  *p = value;
}
void store(uint16_t* p, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  *p = static_cast<uint16_t>(nan ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

template <class T>
void sum(const void* pieces, int nranks, int64_t count, void* result) {
  const T* from = static_cast<const T*>(pieces);
  T* to = static_cast<T*>(result);
  constexpr int64_t kBlock = 1024;  // sums of a block stay in the cache while the pieces stream past
  float sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t size = count - begin < kBlock ? count - begin : kBlock;
    for (int64_t i = 0; i < size; ++i) sums[i] = load(from + begin + i);
    for (int rank = 1; rank < nranks; ++rank)
      for (int64_t i = 0; i < size; ++i) sums[i] += load(from + rank * count + begin + i);
    for (int64_t i = 0; i < size; ++i) store(to + begin + i, sums[i]);
  }
}

}  // namespace

bool can_sum(ncclDataType_t type) {
  return type == ncclFloat32 || type == ncclBfloat16;
}

void sum_in_rank_order(ncclDataType_t type, const void* pieces, int nranks, int64_t count, void* result) {
  type == ncclBfloat16 ? sum<uint16_t>(pieces, nranks, count, result)
                       : sum<float>(pieces, nranks, count, result);
}

}  // namespace nccl_over_mpi
