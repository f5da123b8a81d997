// A schedule on paper, stream by stream: several ranks execute their lists in a random order that streams,
// waits and communicators allow. Neither executor nor hazards.h: it knows no clocks, only what is done.
#pragma once

#include <string>
#include <vector>

#include "shard/schedule.h"
#include "shard/waits.h"

namespace minillm::shard {

/// Runs `steps` steps on `ranks` ranks, the order drawn from `seed`. A collective is executed by all ranks at
/// once, and the collectives of a communicator in the order of issue. Returns the first fault as a sentence,
/// empty when there is none:
/// - nobody can go on, though the lists have not ended;
/// - an operation finds a region as another operation left it than in the order of issue.
std::string run_streams(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits, int steps,
                        int ranks, unsigned seed);

/// The communicators of a collective: 0 gather, 1 reduce, 2 replicate.
std::vector<int> communicators_of(const Operation& operation, const Schedule& schedule);

}  // namespace minillm::shard
