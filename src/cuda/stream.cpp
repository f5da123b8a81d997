#include "cuda/stream.h"

#include <utility>

#include "cuda/check.h"

namespace minillm::cuda {

Stream::Stream(StreamPriority priority) {
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                     priority == StreamPriority::kHigh ? highest : lowest));
}

Stream::~Stream() {
  if (stream_) (void)cudaStreamDestroy(stream_);
}

Stream::Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(stream_, other.stream_);
  return *this;
}

void Stream::synchronize() const {
  check(cudaStreamSynchronize(stream_));
}

Event::Event(EventTiming timing) {
  check(cudaEventCreateWithFlags(
      &event_, timing == EventTiming::kEnabled ? cudaEventDefault : cudaEventDisableTiming));
}

Event::~Event() {
  if (event_) (void)cudaEventDestroy(event_);
}

Event::Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(event_, other.event_);
  return *this;
}

void Event::record(cudaStream_t stream) const {
  check(cudaEventRecord(event_, stream));
}

void Event::wait_on(cudaStream_t stream) const {
  check(cudaStreamWaitEvent(stream, event_, 0));
}

void Event::synchronize() const {
  check(cudaEventSynchronize(event_));
}

}  // namespace minillm::cuda
