// Which operation waits for which, derived from what each reads and writes.
#pragma once

#include <vector>

#include "shard/schedule.h"

namespace minillm::shard {

/// An operation waits until `operation` of this step (steps_back 0) or of the step before (1) is done.
struct Wait {
  int operation = 0;
  int steps_back = 0;
  friend auto operator<=>(const Wait&, const Wait&) = default;
};

/// For each operation its waits on other streams, in the steady state of the step repeated without end: all
/// read-after-write, write-after-read and write-after-write pairs are ordered by stream order and these
/// waits, and none of the waits is implied by the rest (removing any one leaves a conflicting pair
/// unordered).
std::vector<std::vector<Wait>> derive_waits(const Schedule& schedule);

/// Throws InternalError, beginning with `who`, for waits that cannot be met: of another number of operations
/// than the schedule has, or for an operation that does not exist or is not issued before the one that waits.
void check_waits(const char* who, const Schedule& schedule, const std::vector<std::vector<Wait>>& waits);

}  // namespace minillm::shard
