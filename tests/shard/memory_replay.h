// An independent check of a memory plan: replays several steps on the arena and reports every access that
// finds its bytes taken or not yet free. Shares no code with the plan: sizes come from the schedule, order
// from vector clocks of its own, and what a life is from who owns each byte.
#pragma once

#include <string>
#include <vector>

#include "core/dtype.h"
#include "shard/layout.h"
#include "shard/memory_plan.h"
#include "shard/program.h"
#include "shard/schedule.h"
#include "shard/waits.h"

namespace minillm::shard {

/// Empty when the plan is sound for the schedule with these waits. Otherwise one line per defect: a place
/// outside the arena or not aligned, two pieces that overlap for the whole run, content that another piece
/// took before its last use, or accesses of different pieces to the same bytes that nothing orders.
std::vector<std::string> find_memory_faults(const Schedule& schedule,
                                            const std::vector<std::vector<Wait>>& waits, const Layout& layout,
                                            const std::vector<BufferSpec>& buffers, DType parameter_type,
                                            DType moment_type, const MemoryPlan& plan);

}  // namespace minillm::shard
