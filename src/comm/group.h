// The groups into which hybrid sharding divides the ranks of a job.
//
// Shard groups of K consecutive ranks hold one copy of the model each; ranks of equal position in all shard
// groups hold the same piece of it and form a replica group. K = world size gives one shard group and
// replica groups of one rank each.
#pragma once

namespace minillm::comm {

/// The ranks first, first + stride, …, `count` of them.
struct Group {
  int first = 0;
  int stride = 1;
  int count = 0;

  int rank_at(int position) const { return first + position * stride; }
  /// The position of a rank of the job in the group; -1 when it is not a member.
  int position_of(int rank) const;
  bool operator==(const Group&) const = default;
};

/// The groups of `rank` among `world` ranks. Both throw UsageError, naming the sizes allowed, when
/// `shard_ranks`, the ranks that share one copy of the model, does not divide `world`.
Group shard_group(int rank, int world, int shard_ranks);
Group replica_group(int rank, int world, int shard_ranks);

}  // namespace minillm::comm
