// When each piece of memory is in use, and which pieces may therefore lie in the same place.
//
// A piece's life is the accesses that one step's work makes to it. Operations that work for the next step
// (Operation::next_step) belong to the life of that step, so a life may begin at the end of one step and end
// in the next. Two accesses are ordered when stream order and waits say so, in any number of links; where in
// the list they stand says nothing.
//
// Non-goal: lives within a life. A slot whose content is dead for a while is not lent out meanwhile.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "shard/schedule.h"
#include "shard/waits.h"

namespace minillm::shard {

/// By stream, a position in the endless repetition of the step: the number of operations issued before.
using Positions = std::array<int, kStreamCount>;
inline constexpr int kNoPosition = std::numeric_limits<int>::min();

/// What is done when an operation starts, by its position in three steps: by stream, the last operation that
/// stream order and waits say is done. Exact as far back as the first of these steps.
struct StepOrder {
  int operations = 0;                  ///< of one step
  std::vector<StreamId> stream;        ///< by operation
  std::vector<Positions> done_before;  ///< by position
};

/// Throws InternalError for waits that cannot be met: those for operations that do not exist or are not
/// issued before the one that waits.
StepOrder order_of(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits);

/// An operation's access to a piece.
struct Touch {
  int piece = 0;
  bool writes = false;
};

/// Positions count from the start of the step before the one in which the life begins.
struct Life {
  int first = 0;             ///< position of the first access
  int last = 0;              ///< of the last one
  Positions first_access{};  ///< by stream; kNoPosition: none there
  Positions last_access{};   ///< likewise
  Positions done_before{};   ///< by stream, the last operation that is done whichever access comes first
};

/// By piece; nothing for one without accesses. `touches` lists the accesses of every operation of `schedule`
/// to pieces [0, pieces). Throws InternalError for a piece that is handed over to the next step but read in
/// it before it is written.
std::vector<std::optional<Life>> find_lives(const Schedule& schedule, const StepOrder& order,
                                            const std::vector<std::vector<Touch>>& touches, int pieces);

/// Whether all accesses to one piece are over before those to the other begin, and those before the next life
/// of the first.
bool may_share(const Life& a, const Life& b, const StepOrder& order);

/// The most that pieces need at once: the bytes of those that are in use, for all that is known, when some
/// operation runs. No two of these may share, so that no arrangement takes less.
int64_t live_bytes(const std::vector<Life>& lives, const std::vector<int64_t>& bytes, const StepOrder& order);

}  // namespace minillm::shard
