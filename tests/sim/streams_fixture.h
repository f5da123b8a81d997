// What the tests of streams and graphs share.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device_fixture.h"

namespace minillm {

/// Streams and events for a test, destroyed with it.
class Streams : public ::testing::TestWithParam<const char*> {
 protected:
  Streams() { sim::set_streams(GetParam()); }
  ~Streams() override {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
    sim::clear_failure();
    sim::set_streams("threads");
  }
  cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
    streams_.push_back(stream);
    return stream;
  }
  cudaEvent_t new_event(unsigned flags = cudaEventDefault) {
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaEventCreateWithFlags(&event, flags), cudaSuccess);
    events_.push_back(event);
    return event;
  }
  /// Runs `function` on the stream; it lives as long as the test.
  void on(cudaStream_t stream, std::function<void()> function) {
    functions_.push_back(std::make_unique<std::function<void()>>(std::move(function)));
    ASSERT_EQ(
        cudaLaunchHostFunc(
            stream, [](void* f) { (*static_cast<std::function<void()>*>(f))(); }, functions_.back().get()),
        cudaSuccess);
  }

 private:
  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::vector<std::unique_ptr<std::function<void()>>> functions_;
};

}  // namespace minillm
