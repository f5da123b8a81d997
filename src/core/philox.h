// Philox4x32-10: a counter-based random number generator (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC 2011). The same (key, counter) gives the same four words on host and device, so any rank can
// produce any element of a random tensor or any sample of a shuffled data set without the others.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MINILLM_HOST_DEVICE __host__ __device__
#else
#define MINILLM_HOST_DEVICE
#endif

namespace minillm {

struct PhiloxWords {
  uint32_t word[4];
};

/// Four random words for `counter` in the stream named by (seed, stream). `counter` and `stream` are 64 bits
/// wide; streams keep e.g. tensors apart.
MINILLM_HOST_DEVICE constexpr PhiloxWords philox(uint64_t seed, uint64_t stream, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Maps 32 random bits to [0, 1) with 24 bits of resolution: exact in fp32.
MINILLM_HOST_DEVICE constexpr float uniform_from_bits(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

}  // namespace minillm
