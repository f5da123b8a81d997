// A shuffle that is computed, not stored: the image of one index, without the others.
#pragma once

#include <cstdint>

namespace minillm::data {

/// The image of `index` under a permutation of [0, count) that `key` chooses; 0 <= index < count.
int64_t permute(int64_t index, int64_t count, uint64_t key);

}  // namespace minillm::data
