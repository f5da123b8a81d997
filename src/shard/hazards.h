// An independent check of a schedule with its waits: replays several steps with vector clocks and reports
// every conflicting pair of accesses that nothing orders. Shares no code with shard/waits.h on purpose.
#pragma once

#include <string>
#include <vector>

#include "shard/schedule.h"
#include "shard/waits.h"

namespace minillm::shard {

/// Two accesses to one region, at least one a write, on different streams, unordered.
struct Hazard {
  int first = 0;       ///< operation issued earlier
  int second = 0;      ///< operation issued later
  int steps_back = 0;  ///< `first` belongs to that many steps before `second`
  Region region;
};

/// Empty when the schedule is safe. Each hazard is listed once, with steps_back 0 or 1: an older copy of
/// `first` is unordered only if that one is, since streams run in order. Throws InternalError for waits that
/// cannot be met: for an operation that does not exist or is not issued before the one that waits.
std::vector<Hazard> find_hazards(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits);

std::string describe(const Hazard& hazard, const Schedule& schedule,
                     const std::vector<std::string>& unit_names);

}  // namespace minillm::shard
