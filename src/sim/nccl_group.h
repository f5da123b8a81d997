// Group calls of the NCCL stand-in.
#pragma once

#include <nccl.h>

#include <optional>
#include <vector>

#include "sim/nccl_call.h"
#include "sim/nccl_transport.h"

namespace nccl_over_mpi {

/// A valid call that waits for its stream.
struct Issue {
  ncclComm_t communicator;
  Call call;
  const void* send;
  void* receive;
  cudaStream_t stream;
};

/// The collectives that a host thread called since ncclGroupStart.
class Group {
 public:
  bool open() const { return depth_ > 0; }
  void start() { ++depth_; }
  void add(const Issue& issue) { issues_.push_back(issue); }
  /// Remembers the first failure of the group's calls.
  void fail(const Failure& failure);
  /// What the outermost end has to issue, and nothing for others. Throws Failure: the group was not started,
  /// one of its calls failed, or one writes what another reads or writes.
  std::vector<Issue> end();

 private:
  int depth_ = 0;
  std::vector<Issue> issues_;
  std::optional<Failure> failure_;
};

}  // namespace nccl_over_mpi
