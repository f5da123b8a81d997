#include "sim/failure.h"

#include <atomic>
#include <deque>
#include <mutex>

#include "cuda_runtime.h"
#include "sim/control.h"
#include "sim/sanitizer.h"

namespace sim {
namespace {

struct Failure {
  std::mutex mutex;
  std::deque<std::string> texts;  // only grows: cudaGetErrorString's result stays valid
  std::atomic<cudaError_t> code = cudaSuccess;
};
Failure& state() {
  static auto* const failure = new Failure;  // outlives all threads
  return *failure;
}
thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

void set_failure(cudaError_t code, const std::string& text) {
  const InvisibleScope invisible;
  Failure& failure = state();
  std::lock_guard lock(failure.mutex);
  if (failure.code.load(std::memory_order_relaxed) != cudaSuccess) return;
  failure.texts.push_back(text);
  failure.code.store(code, std::memory_order_relaxed);
}

cudaError_t failure() {
  return state().code.load(std::memory_order_relaxed);
}

const char* failure_text() {
  const InvisibleScope invisible;
  std::lock_guard lock(state().mutex);
  return state().texts.empty() ? "no failure" : state().texts.back().c_str();
}

void clear_failure() {
  const InvisibleScope invisible;
  std::lock_guard lock(state().mutex);
  state().code.store(cudaSuccess, std::memory_order_relaxed);
  last_error = cudaSuccess;
}

cudaError_t report(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

cudaError_t finish(cudaError_t code) {
  return report(failure() != cudaSuccess ? failure() : code);
}

namespace {

struct ErrorText {
  cudaError_t code;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorIllegalState, "cudaErrorIllegalState",
     "the operation cannot be performed in the present state"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};
constexpr ErrorText kUnrecognized = {cudaErrorUnknown, "unrecognized error code", "unrecognized error code"};

const ErrorText& find_error(cudaError_t code) {
  for (const ErrorText& error : kErrors)
    if (error.code == code) return error;
  return kUnrecognized;
}

}  // namespace
}  // namespace sim

const char* cudaGetErrorName(cudaError_t error) {
  return sim::find_error(error).name;
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error != cudaSuccess && error == sim::failure()) return sim::failure_text();
  return sim::find_error(error).text;
}

cudaError_t cudaPeekAtLastError() {
  return sim::failure() != cudaSuccess ? sim::failure() : sim::last_error;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  sim::last_error = cudaSuccess;
  return error;
}
