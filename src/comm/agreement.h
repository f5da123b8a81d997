// Whether all ranks of a job were started alike.
//
// Goals: one exchange before the first step that finds what would otherwise train on in silence or wait for
// ever: another configuration, program or file on some rank; a message that names each difference, its values
// and the ranks that have them; a size that does not grow with the number of ranks where they agree.
// Non-goals: what the statements are about, which callers know.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "comm/bootstrap.h"

namespace minillm::comm {

/// Something that all ranks have to have the same of, and what this rank has. Both are text without NUL. An
/// empty value, like a statement that is not made, is that this rank has none.
struct Statement {
  std::string key;
  std::string value;
};

/// Compares what the ranks state; each states a key once, and the order does not matter. Collective. Throws
/// CommunicationError with the same message on all ranks unless all agree: the keys in rank 0's order with
/// their values and ranks, as in "train.seed is 0 on ranks 0, 2–7 and 1 on rank 1".
void agree(Bootstrap& bootstrap, std::span<const Statement> statements);

// What agree() is made of; no communication.

/// How many differences are told, how many values of each, and how many bytes of a value.
inline constexpr size_t kMostDifferences = 16, kMostValues = 4, kLongestValue = 200;

/// What `mine` states otherwise than `first`, in first's order, then by key what only `mine` has; at most
/// kMostDifferences + 1, values shortened to about kLongestValue.
std::vector<Statement> differences(std::span<const Statement> first, std::span<const Statement> mine);

/// The message for the differences of all ranks from `first`, which are rank 0's statements; empty when there
/// are none. `of_ranks[r]` are rank r's, those of rank 0 are empty.
std::string disagreement(std::span<const Statement> first, std::span<const std::vector<Statement>> of_ranks);

}  // namespace minillm::comm
