// The order in which collectives run that must not run at the same time.
#pragma once

#include <nccl.h>

#include <cstdint>

namespace nccl_over_mpi {

/// Throws Failure naming `call` when `code` is not cudaSuccess.
void check(cudaError_t code, const char* call);

/// Lets each collective wait for the one issued before it, whatever the streams.
///
/// On the simulated device an order belongs to one communicator. CUDA may run the host functions of all
/// streams on one thread, where two communicators' collectives that ranks begin in different orders would
/// wait for each other for ever: there, all objects of this class are one order.
class IssueOrder {
 public:
  IssueOrder() = default;
  ~IssueOrder();
  IssueOrder(const IssueOrder&) = delete;
  IssueOrder& operator=(const IssueOrder&) = delete;

  /// Before and after a collective's operations are put on `stream`.
  void begin(cudaStream_t stream);
  void end(cudaStream_t stream);

 private:
  IssueOrder& shared();

  cudaEvent_t last_ = nullptr;
  uint64_t capture_ = 0;  ///< in which `last_` was recorded; 0 outside of captures
};

}  // namespace nccl_over_mpi
