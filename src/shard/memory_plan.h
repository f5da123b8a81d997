// The one allocation of a training run, laid out before the first step.
//
// Shards, slots and scalars live for the whole run. The program's buffers live from the first to the last
// operation of the step that names them and are placed by best fit over these lifetimes; a buffer that
// operations on more than one stream touch, or with Purpose::kInputs or kWorkspace, keeps its place for the
// whole run, so memory is only shared between operations that one stream orders.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "shard/layout.h"
#include "shard/program.h"
#include "shard/schedule.h"

namespace minillm::shard {

inline constexpr int64_t kPlanAlignment = 256;  // bytes

/// A placed range. `first` and `last` are operations of the schedule, inclusive; 0 and the last one for
/// memory that lives for the whole run.
struct Placement {
  std::string name;
  Purpose purpose{};
  int64_t offset = 0;
  int64_t bytes = 0;
  int first = 0;
  int last = 0;
};

struct MemoryPlan {
  int64_t bytes = 0;  ///< of the arena: the planned peak
  std::vector<Placement> placements;

  // Offsets into the arena, by unit, slot or buffer. With fp32 parameters parameter_shard[u] == master[u].
  std::vector<int64_t> parameter_shard, master, moment1, moment2, gradient_shard;
  std::vector<int64_t> weight_slot, gradient_slot, buffer;
  int64_t valid_count = 0, loss_sum = 0, norm_partials = 0, stats = 0, clip = 0;

  std::string peak_operation;  ///< the first operation at which most memory is live, for people

  /// Bytes by purpose at their own peak, then the arena: one line each, for people.
  std::string table() const;
};

MemoryPlan plan_memory(const Schedule& schedule, const Layout& layout, const Program& program,
                       DType parameter_type, DType moment_type = DType::kFp32);

}  // namespace minillm::shard
