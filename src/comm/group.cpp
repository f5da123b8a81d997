#include "comm/group.h"

#include <string>

#include "core/error.h"

namespace minillm::comm {
namespace {

void require_divisor(int world, int shard_ranks) {
  if (shard_ranks > 0 && world % shard_ranks == 0) return;
  std::string allowed = "1";
  for (int size = 2; size <= world; ++size)
    if (world % size == 0) allowed += ", " + std::to_string(size);
  throw UsageError("shard groups of " + std::to_string(shard_ranks) + " ranks do not divide a job of " +
                   std::to_string(world) + "; allowed: " + allowed);
}

}  // namespace

int Group::position_of(int rank) const {
  const int distance = rank - first;
  const bool member = distance >= 0 && distance % stride == 0 && distance / stride < count;
  return member ? distance / stride : -1;
}

Group shard_group(int rank, int world, int shard_ranks) {
  require_divisor(world, shard_ranks);
  return {.first = rank - rank % shard_ranks, .stride = 1, .count = shard_ranks};
}

Group replica_group(int rank, int world, int shard_ranks) {
  require_divisor(world, shard_ranks);
  return {.first = rank % shard_ranks, .stride = shard_ranks, .count = world / shard_ranks};
}

}  // namespace minillm::comm
