// NCCL communicators with an owner, and the bytes that they moved.
//
// Goals: collectives as the executor needs them, over all ranks or over the groups of hybrid sharding; errors
// with names. Non-goals: choosing algorithms, which is NCCL's work. Sums are plain sums: averaging operators
// lose NCCL's fast paths and round early, so scaling is done by the loss's gradient.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdint>
#include <functional>
#include <string>

#include "comm/bootstrap.h"
#include "comm/group.h"
#include "comm/path.h"
#include "core/dtype.h"

namespace minillm::comm {

/// Collectives and bytes sent over the wire by this rank, per kind, by the ring formulas with the N ranks of
/// the communicator: (N-1)/N of the full buffer for all-gather and reduce-scatter, twice that for all-reduce.
/// A collective that is fused with others counts like any other; one in a CUDA graph when it is captured, not
/// when it is replayed.
struct Traffic {
  int64_t all_gather_calls = 0, all_gather_bytes = 0;
  int64_t reduce_scatter_calls = 0, reduce_scatter_bytes = 0;
  int64_t all_reduce_calls = 0, all_reduce_bytes = 0;
};

/// Ranks in these methods are positions in the group. All ranks issue the collectives of all their
/// communicators from one host thread in one order; then collectives of several communicators may be on the
/// device at once.
class Communicator {
 public:
  struct Options {
    std::string name;  ///< in errors, and in NCCL's logs
    Group group = {};  ///< this rank's; of no ranks: all ranks of the bootstrap
    int max_ctas = 0;  ///< thread blocks that NCCL's kernels may take, 1 to 64; 0: NCCL's choice
    /// Asks for all-gathers by copy engines, where NCCL has no fault in them (path.h); they need both buffers
    /// in an Arena. There are no sums by copy engines, and the communicator makes none. NCCL allows its
    /// gathers in captured graphs or outside of them, not both.
    bool zero_ctas = false;
  };

  /// Collective over all ranks of `bootstrap`, which name groups that divide them: one communicator is made
  /// for each group. The current device is used. Throws CommunicationError, on all ranks when the groups do
  /// not fit together.
  Communicator(Bootstrap& bootstrap, const Options& options);
  /// Arenas that it belongs to are destroyed before.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return facts_.ranks; }
  const std::string& name() const { return name_; }

  /// full[size * count] = the shards [count] of all ranks in rank order. In place when
  /// shard == full + rank * count.
  void all_gather(void* full, const void* shard, int64_t count, DType dtype, cudaStream_t stream);
  /// shard[count] = sum over ranks of their full[rank * count ...], both of `dtype`. In place when
  /// shard == full + rank * count. On several nodes NCCL rounds bf16 sums after each addition.
  void reduce_scatter(void* shard, const void* full, int64_t count, DType dtype, cudaStream_t stream);
  /// In-place sum over ranks.
  void all_reduce(float* values, int64_t count, cudaStream_t stream);

  /// Runs `calls`, and issues the collectives in it as one: NCCL starts them together at the end, on the one
  /// stream that they name, in no particular order, so none may write what another reads or writes. If
  /// `calls` throws, what it has called is issued before the exception goes on.
  void fuse(const std::function<void()>& calls);

  const Traffic& traffic() const { return traffic_; }

  /// "name: " and the way that NCCL moves its data, with the reason where it is not the fastest (path.h).
  std::string describe() const;
  const PathFacts& facts() const { return facts_; }

  /// The error of a collective that failed after it was issued, or an empty string. For the watchdog.
  std::string asynchronous_error() const;

 private:
  friend class Arena;  // registers windows

  void require_sums() const;

  std::string name_;
  PathFacts facts_;
  int rank_ = 0;
  ncclComm_t comm_ = nullptr;
  Traffic traffic_;
};

}  // namespace minillm::comm
