#include "sim/capture.h"

#include <algorithm>
#include <utility>

#include "sim/stream.h"

namespace sim {

cudaStreamCaptureMode& thread_capture_mode() {
  thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

Capture::Capture(uint64_t id, cudaStreamCaptureMode mode) : id(id), mode(mode) {}

void Capture::join(CUstream_st& stream) {
  stream.capture = this;
  stream.branch = recording_.branches++;
  streams.push_back(&stream);
  for (Clock& clock : clocks_) clock.resize(recording_.branches);
  clocks_.emplace_back(recording_.branches);
}

bool Capture::has_blocking_stream() const {
  return std::any_of(streams.begin(), streams.end(), [](const CUstream_st* stream) {
    return stream != nullptr && (stream->flags & cudaStreamNonBlocking) == 0;
  });
}

void Capture::count(size_t branch) {
  ++clocks_[branch][branch];
}

void Capture::add(size_t branch, Operation operation) {
  recording_.entries.push_back({Recording::Kind::kOperation, branch, std::move(operation)});
  count(branch);
}

CapturedRecord Capture::record(size_t branch) {
  recording_.entries.push_back({Recording::Kind::kRecord, branch});
  return {id, recording_.entries.size() - 1, clocks_[branch]};
}

void Capture::wait(size_t branch, const CapturedRecord& record) {
  recording_.entries.push_back({Recording::Kind::kWait, branch, {}, record.entry});
  Clock& clock = clocks_[branch];
  for (size_t i = 0; i < record.clock.size(); ++i) clock[i] = std::max(clock[i], record.clock[i]);
}

void Capture::record_event(size_t branch, cudaEvent_t event) {
  recording_.entries.push_back({Recording::Kind::kRecordEvent, branch, {}, 0, event});
  count(branch);
}

void Capture::wait_for_event(size_t branch, cudaEvent_t event) {
  recording_.entries.push_back({Recording::Kind::kWaitForEvent, branch, {}, 0, event});
  count(branch);
}

void Capture::at_launch(std::function<void()> function) {
  recording_.at_launch.push_back(std::move(function));
}

bool Capture::joined() const {
  for (size_t branch = 0; branch < clocks_.size(); ++branch)
    if (clocks_[0][branch] != clocks_[branch][branch]) return false;
  return true;
}

Recording Capture::take() {
  return std::move(recording_);
}

// --- the scheduler's part ---------------------------------------------------------------------------------

cudaError_t Scheduler::invalidate(Capture& capture, cudaError_t error) {
  capture.invalidated = true;
  return error;
}

Capture* Scheduler::find_capture(uint64_t id) {
  for (const auto& capture : captures_)
    if (capture->id == id) return capture.get();
  return nullptr;
}

cudaError_t Scheduler::admit(const CUstream_st& stream) {
  if (stream.capture != nullptr)
    return stream.capture->invalidated ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  cudaError_t error = cudaSuccess;
  if (&stream == default_)
    for (const auto& capture : captures_)
      if (capture->has_blocking_stream()) error = invalidate(*capture, cudaErrorStreamCaptureImplicit);
  return error;
}

cudaError_t Scheduler::admit_unsafe_call() {
  cudaError_t error = cudaSuccess;
  const cudaStreamCaptureMode mode = thread_capture_mode();
  if (mode == cudaStreamCaptureModeRelaxed) return error;
  for (const auto& capture : captures_) {
    const bool own =
        capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool global = mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (own || global) error = invalidate(*capture, cudaErrorStreamCaptureUnsupported);
  }
  return error;
}

cudaError_t Scheduler::check_unsafe_call() {
  Lock lock(mutex_);
  return admit_unsafe_call();
}

cudaError_t Scheduler::check_host_wait() {
  Lock lock(mutex_);
  for (const auto& capture : captures_) capture->invalidated = true;
  return captures_.empty() ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

cudaError_t Scheduler::check_host_wait(cudaStream_t stream) {
  Lock lock(mutex_);
  const CUstream_st& target = resolve(stream);
  if (const cudaError_t error = admit(target)) return error;
  if (target.capture != nullptr) return invalidate(*target.capture, cudaErrorStreamCaptureUnsupported);
  return admit_unsafe_call();
}

cudaError_t Scheduler::check_host_wait(cudaEvent_t event) {
  Lock lock(mutex_);
  if (!event->captured) return admit_unsafe_call();
  if (Capture* capture = find_capture(event->captured->capture)) capture->invalidated = true;
  return cudaErrorCapturedEvent;
}

cudaError_t Scheduler::begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (stream == nullptr) return cudaErrorStreamCaptureUnsupported;
  Lock lock(mutex_);
  if (stream->capture != nullptr) return cudaErrorIllegalState;
  captures_.push_back(std::make_unique<Capture>(++captures_begun_, mode));
  captures_.back()->join(*stream);
  return cudaSuccess;
}

cudaError_t Scheduler::end_capture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(mutex_);
  Capture* capture = stream == nullptr ? nullptr : stream->capture;
  if (capture == nullptr) return cudaErrorIllegalState;
  if (stream->branch != 0) return invalidate(*capture, cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return cudaErrorStreamCaptureWrongThread;
  cudaError_t error = cudaSuccess;
  if (capture->invalidated)
    error = cudaErrorStreamCaptureInvalidated;
  else if (!capture->joined())
    error = cudaErrorStreamCaptureUnjoined;
  else
    *graph = add_graph(capture->take());
  drop(*capture);
  return error;
}

cudaError_t Scheduler::capture_status(cudaStream_t stream, cudaStreamCaptureStatus& status, uint64_t& id) {
  Lock lock(mutex_);
  const CUstream_st& target = resolve(stream);
  status = cudaStreamCaptureStatusNone;
  if (target.capture != nullptr) {
    id = target.capture->id;
    status = target.capture->invalidated ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  }
  const bool implicit =
      stream == nullptr &&
      std::any_of(captures_.begin(), captures_.end(), [](const auto& c) { return c->has_blocking_stream(); });
  return implicit ? cudaErrorStreamCaptureImplicit : cudaSuccess;
}

void Scheduler::drop(Capture& capture) {
  for (CUstream_st* stream : capture.streams)
    if (stream != nullptr) stream->capture = nullptr;
  std::erase_if(captures_, [&](const auto& c) { return c.get() == &capture; });
}

void Scheduler::leave_capture(CUstream_st& stream) {
  if (stream.capture == nullptr) return;
  Capture& capture = *stream.capture;
  capture.invalidated = true;
  capture.streams[stream.branch] = nullptr;
  stream.capture = nullptr;
  if (stream.branch == 0) drop(capture);  // no call can end it any more
}

void Scheduler::record_captured(CUstream_st& stream, cudaEvent_t event, bool external) {
  if (external) {
    stream.capture->record_event(stream.branch, event);
  } else {
    event->mark = nullptr;
    event->captured = stream.capture->record(stream.branch);
  }
}

cudaError_t Scheduler::wait_captured(CUstream_st& stream, cudaEvent_t event, bool external) {
  if (external) {
    stream.capture->wait_for_event(stream.branch, event);
    return cudaSuccess;
  }
  if (!event->captured) return invalidate(*stream.capture, cudaErrorStreamCaptureIsolation);
  Capture* capture = find_capture(event->captured->capture);
  if (stream.capture == nullptr) {
    if (capture == nullptr) return cudaErrorStreamCaptureIsolation;
    if (capture->invalidated) return cudaErrorStreamCaptureInvalidated;
    if (&stream == default_) return invalidate(*capture, cudaErrorStreamCaptureUnsupported);
    capture->join(stream);
  } else if (capture != stream.capture) {
    if (capture != nullptr) capture->invalidated = true;
    return invalidate(*stream.capture, cudaErrorStreamCaptureMerge);
  }
  capture->wait(stream.branch, *event->captured);
  return cudaSuccess;
}

}  // namespace sim
