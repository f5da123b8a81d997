// NCCL communicators with an owner, and the bytes that they moved.
//
// Goals: collectives as the executor needs them; errors with names. Sums are plain sums: averaging operators
// lose NCCL's fast paths and round early, so scaling is done by the loss's gradient.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdint>
#include <string>

#include "comm/bootstrap.h"
#include "core/dtype.h"

namespace minillm::comm {

/// Calls and bytes sent over the wire by this rank, per collective, by the ring formulas: (N-1)/N of the full
/// buffer for all-gather and reduce-scatter, twice that for all-reduce.
struct Traffic {
  int64_t all_gather_calls = 0, all_gather_bytes = 0;
  int64_t reduce_scatter_calls = 0, reduce_scatter_bytes = 0;
  int64_t all_reduce_calls = 0, all_reduce_bytes = 0;
};

class Communicator {
 public:
  /// Collective over all ranks of `bootstrap`. `name` appears in errors. Throws CommunicationError.
  Communicator(Bootstrap& bootstrap, std::string name);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }

  /// full[size * count] = the shards [count] of all ranks in rank order. In place when
  /// shard == full + rank * count.
  void all_gather(void* full, const void* shard, int64_t count, DType dtype, cudaStream_t stream);
  /// shard[count] = sum over ranks of their full[rank * count ...]. In place when
  /// shard == full + rank * count.
  void reduce_scatter(float* shard, const float* full, int64_t count, cudaStream_t stream);
  /// In-place sum over ranks.
  void all_reduce(float* values, int64_t count, cudaStream_t stream);

  const Traffic& traffic() const { return traffic_; }

  /// The error of a collective that failed after it was issued, or an empty string. For the watchdog.
  std::string asynchronous_error() const;

 private:
  std::string name_;
  int rank_ = 0;
  int size_ = 1;
  ncclComm_t comm_ = nullptr;
  Traffic traffic_;
};

}  // namespace minillm::comm
