#include "sim/nccl_issue_order.h"

#include <string>

#include "sim/nccl_transport.h"

namespace nccl_over_mpi {
namespace {

/// An identification of the capture that the stream is part of, or 0. Events do not cross its border.
uint64_t capture_of([[maybe_unused]] cudaStream_t stream) {
#if defined(CUDART_VERSION)
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? id : 0;
#else
  return 0;
#endif
}

}  // namespace

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Failure(ncclUnhandledCudaError,
                std::string(call) + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code));
}

IssueOrder::~IssueOrder() {
  if (last_) (void)cudaEventDestroy(last_);
}

IssueOrder& IssueOrder::shared() {
#if defined(CUDART_VERSION)
  static IssueOrder& all = *new IssueOrder;  // never destroyed: at exit the CUDA runtime may be gone first
  return all;
#else
  return *this;
#endif
}

void IssueOrder::begin(cudaStream_t stream) {
  const IssueOrder& order = shared();
  if (order.last_ && order.capture_ == capture_of(stream))
    check(cudaStreamWaitEvent(stream, order.last_, 0), "cudaStreamWaitEvent");
}

void IssueOrder::end(cudaStream_t stream) {
  IssueOrder& order = shared();
  if (!order.last_)
    check(cudaEventCreateWithFlags(&order.last_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  check(cudaEventRecord(order.last_, stream), "cudaEventRecord");
  order.capture_ = capture_of(stream);
}

}  // namespace nccl_over_mpi
