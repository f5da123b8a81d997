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
///
/// Captured collectives are issued when their graph is launched. Within a capture they wait for one another
/// by edges of the graph; the first also waits for what was issued before the launch, and what is issued
/// after it waits for the last, by events outside of the graph.
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

  cudaEvent_t last_ = nullptr;      ///< recorded outside of captures, and by launched graphs
  cudaEvent_t captured_ = nullptr;  ///< last recorded in the capture `capture_`
  uint64_t capture_ = 0;
};

}  // namespace nccl_over_mpi
