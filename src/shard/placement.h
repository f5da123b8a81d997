// Puts pieces of memory side by side or one after another in time, in as little space as can be found.
//
// Best fit in several fixed orders, of which the smallest result is taken and, where it is larger than it has
// to be, improved by a bounded local search. Rejected: exact search, which takes longer than all the plans
// that a search over settings makes.
#pragma once

#include <cstdint>
#include <vector>

#include "shard/lifetimes.h"

namespace minillm::shard {

struct Arrangement {
  int64_t bytes = 0;             ///< of all pieces together
  int64_t live_bytes = 0;        ///< what live_bytes() says that it cannot be below
  std::vector<int64_t> offsets;  ///< from 0, by piece
};

/// Pieces overlap only where may_share holds. `bytes` are multiples of the alignment that places need. The
/// same pieces get the same places on every machine.
Arrangement arrange(const std::vector<Life>& lives, const std::vector<int64_t>& bytes,
                    const StepOrder& order);

}  // namespace minillm::shard
