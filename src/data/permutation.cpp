#include "data/permutation.h"

#include <bit>

#include "core/error.h"
#include "core/philox.h"

namespace minillm::data {
namespace {

constexpr int kRounds =
    6;  // four make a random function a random permutation (Luby, Rackoff); small halves need more

/// A balanced Feistel network on 2 · half_bits bits: a bijection whatever the round function is.
uint64_t feistel(uint64_t value, int half_bits, uint64_t key) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = value >> half_bits, right = value & mask;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t next = left ^ (philox(key, round, right).word[0] & mask);
    left = right;
    right = next;
  }
  return left << half_bits | right;
}

}  // namespace

int64_t permute(int64_t index, int64_t count, uint64_t key) {
  if (index < 0 || index >= count) throw InternalError("permute: index outside of the permuted range");
  // The smallest even number of bits holds fewer than 4 · count values. Walking along the cycle until it is
  // back among the first `count` restricts the bijection to them.
  const int half_bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(count - 1)) + 1) / 2;
  uint64_t value = index;
  do {
    value = feistel(value, half_bits, key);
  } while (value >= static_cast<uint64_t>(count));
  return static_cast<int64_t>(value);
}

}  // namespace minillm::data
