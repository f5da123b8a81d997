#include "sim/nccl_issue_order.h"

#include <string>

#include "sim/nccl_transport.h"

namespace nccl_over_mpi {
namespace {

/// An identification of the capture that the stream is part of, or 0.
uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

void create(cudaEvent_t& event) {
  if (!event) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
}

}  // namespace

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Failure(ncclUnhandledCudaError,
                std::string(call) + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code));
}

IssueOrder::~IssueOrder() {
  for (cudaEvent_t event : {last_, captured_})
    if (event) (void)cudaEventDestroy(event);
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
  IssueOrder& order = shared();
  const uint64_t capture = capture_of(stream);
  create(order.last_);
  if (capture == 0)
    check(cudaStreamWaitEvent(stream, order.last_, 0), "cudaStreamWaitEvent");
  else if (capture == order.capture_)
    check(cudaStreamWaitEvent(stream, order.captured_, 0), "cudaStreamWaitEvent in a capture");
  else
    check(cudaStreamWaitEvent(stream, order.last_, cudaEventWaitExternal), "cudaStreamWaitEvent of a graph");
}

void IssueOrder::end(cudaStream_t stream) {
  IssueOrder& order = shared();
  const uint64_t capture = capture_of(stream);
  if (capture == 0) return check(cudaEventRecord(order.last_, stream), "cudaEventRecord");
  create(order.captured_);
  check(cudaEventRecordWithFlags(order.last_, stream, cudaEventRecordExternal), "cudaEventRecord of a graph");
  check(cudaEventRecord(order.captured_, stream), "cudaEventRecord in a capture");
  order.capture_ = capture;
}

}  // namespace nccl_over_mpi
