// The one simulated device of the process.
#pragma once

#include "sim/memory.h"
#include "sim/stream.h"

namespace sim {

struct Device {
  Memory memory;  // destroyed last: operations in flight use it
  Scheduler scheduler;
};

/// Created at first use. Objects that own device memory must not outlive it: none with static storage
/// duration.
Device& device();

}  // namespace sim
