// Streams and events with an owner.
#pragma once

#include <cuda_runtime.h>

namespace minillm::cuda {

enum class StreamPriority { kNormal, kHigh };

/// Owns a non-blocking stream (no implicit ordering with the default stream). Movable, not copyable.
class Stream {
 public:
  explicit Stream(StreamPriority priority = StreamPriority::kNormal);
  ~Stream();
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  /// Blocks the host until all work is done. Throws DeviceError for errors of that work.
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

enum class EventTiming { kDisabled, kEnabled };

/// Owns an event. Movable, not copyable.
class Event {
 public:
  explicit Event(EventTiming timing = EventTiming::kDisabled);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const;
  /// Later work of `stream` waits for what the last record() covered; nothing when never recorded.
  void wait_on(cudaStream_t stream) const;
  /// Blocks the host. Throws DeviceError for errors of the work waited for.
  void synchronize() const;

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace minillm::cuda
