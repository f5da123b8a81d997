// The one allocation of a training run, laid out before the first step.
//
// Parameters, optimizer state, scalars and the program's inputs and workspaces keep a place for the whole
// run. All else (slots, gradient shards, the program's other buffers) lives from the first to the last
// operation of a step's work that names it (shard/lifetimes.h), and two such pieces share memory where stream
// order and the schedule's waits alone order every access to the one before every access to the other, in the
// step and over its end into the next: sharing never costs a wait.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "shard/layout.h"
#include "shard/program.h"
#include "shard/schedule.h"
#include "shard/waits.h"

namespace minillm::shard {

inline constexpr int64_t kPlanAlignment = 256;  // bytes

/// A placed range. `first` and `last` are operations of the schedule, inclusive; 0 and the last one for
/// memory that lives for the whole run, or that is in use at every operation. A life that begins at the end
/// of the step before has last < first.
struct Placement {
  std::string name;
  Purpose purpose{};
  int64_t offset = 0;
  int64_t bytes = 0;
  int first = 0;
  int last = 0;
};

struct MemoryPlan {
  int64_t bytes = 0;       ///< of the arena: the planned peak
  int64_t live_bytes = 0;  ///< most that is in use at once, each piece aligned: no plan can need less
  std::vector<Placement> placements;

  // Offsets into the arena, by unit, slot or buffer; -1 for slots and buffers without a place, since no
  // operation names them. The fp32 master weights are the parameter shard itself, or where that is bf16, its
  // elements and the lower halves (core/split_float.h); with fp32 parameters those are -1. A unit's second
  // moment lies right behind its first.
  std::vector<int64_t> parameter_shard, lower_half, moment1, moment2;
  std::vector<int64_t> weight_slot, gradient_slot, shard_slot, buffer;
  int64_t wire = -1, reduced_piece = -1;  ///< -1: there is none, or no operation names it
  int64_t valid_count = 0, loss_sum = 0, loss_total = 0, gate = 0, norm_partials = 0, norm_total = 0,
          clip = 0;

  std::string peak_operation;  ///< the first operation at which most memory is live, for people

  /// Most that is in use at once for a purpose.
  int64_t peak_bytes(Purpose purpose) const;
  /// Bytes by purpose at their own peak, then the arena: one line each, for people.
  std::string table() const;
};

/// `waits` is derive_waits(schedule). The result does not depend on what an operation is called, only on its
/// stream, step, regions and waits, and is the same for the same arguments on every machine.
///
/// Throws InternalError for a buffer of negative size, a region of a slot or buffer that does not exist,
/// waits that cannot be met, and a piece that is handed over to the next step but read in it before it is
/// written.
MemoryPlan plan_memory(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits,
                       const Layout& layout, const Program& program, DType parameter_type,
                       DType moment_type = DType::kFp32);

}  // namespace minillm::shard
