#include "comm/phase.h"

#include <algorithm>
#include <utility>

#include "core/format.h"

namespace minillm::comm {

void PhaseTimer::enter(Phase phase) {
  phase_ = std::move(phase);
  progress();
}

void PhaseTimer::tick(Clock::time_point now) {
  idle_ += std::min<Clock::duration>(now - last_tick_, 2 * kTick);
  last_tick_ = now;
}

std::string PhaseTimer::complaint(int ranks) const {
  return format("no progress for %g s in ", phase_.limit_s) + phase_.name + ": " +
         (ranks > 1 ? "another rank has failed or is stopped, " : "") +
         "the device or a file system does not answer, or this takes longer than " + phase_.limit;
}

}  // namespace minillm::comm
