// What a capture forbids: each call's error, that it invalidates the capture, and that the streams are free
// after the end.
#include <array>
#include <functional>
#include <thread>

#include "streams_fixture.h"

namespace minillm {
namespace {

class Captures : public Streams {
 protected:
  Captures() : stream_(new_stream()), other_(new_stream()), event_(new_event()) {}
  ~Captures() override { cudaGetLastError(); }

  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    ASSERT_EQ(cudaStreamBeginCapture(stream_, mode), cudaSuccess);
    on(stream_, [] {});
  }
  cudaError_t end() { return end(stream_); }
  static cudaError_t end(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(stream, &graph);
    EXPECT_EQ(graph != nullptr, error == cudaSuccess);
    if (graph != nullptr) cudaGraphDestroy(graph);
    return error;
  }
  cudaStreamCaptureStatus status(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    return status;
  }
  void expect_usable(cudaStream_t stream) {
    EXPECT_EQ(status(stream), cudaStreamCaptureStatusNone);
    bool ran = false;
    on(stream, [&] { ran = true; });
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(ran);
  }
  /// In a capture of stream_, `call` returns `error` and the capture is no longer valid.
  void expect_forbidden(const char* name, cudaError_t error, const std::function<cudaError_t()>& call,
                        cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    SCOPED_TRACE(name);
    begin(mode);
    EXPECT_EQ(call(), error);
    EXPECT_EQ(status(stream_), cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(cudaEventRecord(event_, stream_), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
    expect_usable(stream_);
    expect_usable(other_);
  }
  void expect_allowed(const char* name, const std::function<cudaError_t()>& call,
                      cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    SCOPED_TRACE(name);
    begin(mode);
    EXPECT_EQ(call(), cudaSuccess);
    EXPECT_EQ(end(), cudaSuccess);
    expect_usable(stream_);
  }
  static cudaError_t in_another_thread(const std::function<cudaError_t()>& call) {
    cudaError_t error = cudaSuccess;
    std::thread([&] { error = call(); }).join();
    return error;
  }

  cudaStream_t stream_, other_;
  cudaEvent_t event_;
};

TEST_P(Captures, StatusAndId) {
  unsigned long long ids[2];
  for (auto& id : ids) {
    EXPECT_EQ(status(stream_), cudaStreamCaptureStatusNone);
    begin();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EXPECT_EQ(cudaStreamGetCaptureInfo(stream_, &status, &id), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusActive);
    EXPECT_EQ(this->status(other_), cudaStreamCaptureStatusNone);
    EXPECT_EQ(end(), cudaSuccess);
  }
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_NE(ids[0], 0u);
}

TEST_P(Captures, ForbidWaitsForWhatIsCaptured) {
  const auto waits = [&](const char* name, auto call) {
    for (const auto mode : {cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed})
      expect_forbidden(name, cudaErrorStreamCaptureUnsupported, call, mode);
  };
  waits("cudaStreamSynchronize", [&] { return cudaStreamSynchronize(stream_); });
  waits("cudaStreamQuery", [&] { return cudaStreamQuery(stream_); });
  waits("cudaDeviceSynchronize", [] { return cudaDeviceSynchronize(); });
  for (const auto call : {cudaEventQuery, cudaEventSynchronize})
    expect_forbidden("captured event", cudaErrorCapturedEvent, [&] {
      EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
      return call(event_);
    });
  EXPECT_EQ(cudaEventQuery(event_), cudaErrorCapturedEvent) << "still, after the capture";
  EXPECT_EQ(cudaEventRecord(event_, other_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event_), cudaSuccess) << "until it is recorded elsewhere";
}

TEST_P(Captures, ForbidUnsafeCallsByMode) {
  Array<int> array(std::vector{7});
  void* memory = nullptr;
  const std::function<cudaError_t()> calls[] = {
      [&] {
        const cudaError_t error = cudaMalloc(&memory, 16);
        return error == cudaSuccess ? cudaFree(memory) : error;
      },
      [&] {
        const cudaError_t error = cudaMallocHost(&memory, 16);
        return error == cudaSuccess ? cudaFreeHost(memory) : error;
      },
      [&] { return cudaFree(array.get()) == cudaSuccess ? cudaSuccess : cudaErrorStreamCaptureUnsupported; },
      [&] { return cudaEventQuery(event_); },
      [&] { return cudaEventSynchronize(event_); },
      [&] { return cudaStreamSynchronize(other_); },
      [&] { return cudaMemset(array.get(), 0, sizeof(int)); },
      [&] { return cudaMemcpy(array.get(), array.get(), sizeof(int), cudaMemcpyDeviceToDevice); },
  };
  for (size_t i = 0; i < std::size(calls); ++i) {
    const std::string name = "call " + std::to_string(i);
    const bool frees_the_array = i == 2;
    for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal})
      expect_forbidden(name.c_str(), cudaErrorStreamCaptureUnsupported, calls[i], mode);
    expect_forbidden(
        name.c_str(), cudaErrorStreamCaptureUnsupported, [&] { return in_another_thread(calls[i]); },
        cudaStreamCaptureModeGlobal);
    if (frees_the_array) continue;
    expect_allowed(name.c_str(), [&] { return in_another_thread(calls[i]); });
    expect_allowed(name.c_str(), calls[i], cudaStreamCaptureModeRelaxed);
    expect_allowed(name.c_str(), [&] {  // as libraries do that know what they are doing
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
      EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
      const cudaError_t error = calls[i]();
      EXPECT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
      EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
      return error;
    });
  }
}

TEST_P(Captures, ForbidPageableMemory) {
  Array<int> array(std::vector{7});
  int host = 0;
  expect_forbidden("source", cudaErrorStreamCaptureUnsupported, [&] {
    return cudaMemcpyAsync(array.get(), &host, sizeof host, cudaMemcpyHostToDevice, stream_);
  });
  expect_forbidden("target", cudaErrorStreamCaptureUnsupported, [&] {
    return cudaMemcpyAsync(&host, array.get(), sizeof host, cudaMemcpyDeviceToHost, stream_);
  });
}

TEST_P(Captures, DependenciesDoNotCrossTheirBorder) {
  expect_forbidden("an event recorded outside", cudaErrorStreamCaptureIsolation, [&] {
    EXPECT_EQ(cudaEventRecord(event_, other_), cudaSuccess);
    return cudaStreamWaitEvent(stream_, event_);
  });
  const cudaEvent_t unrecorded = new_event();
  expect_forbidden("an event never recorded", cudaErrorStreamCaptureIsolation,
                   [&] { return cudaStreamWaitEvent(stream_, unrecorded); });
  begin();
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  ASSERT_EQ(end(), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other_, event_), cudaErrorStreamCaptureIsolation) << "the capture is over";
  expect_usable(other_);
}

TEST_P(Captures, TwoDoNotMerge) {
  ASSERT_EQ(cudaStreamBeginCapture(other_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  begin();
  ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(other_, event_), cudaErrorStreamCaptureMerge);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end(other_), cudaErrorStreamCaptureInvalidated);
  expect_usable(stream_);
  expect_usable(other_);
}

TEST_P(Captures, ForksHaveToJoin) {
  for (const bool work : {false, true}) {
    for (const bool join : {false, true}) {
      begin();
      ASSERT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
      ASSERT_EQ(cudaStreamWaitEvent(other_, event_), cudaSuccess);
      EXPECT_EQ(status(other_), cudaStreamCaptureStatusActive);
      if (join) {
        on(other_, [] {});
        ASSERT_EQ(cudaEventRecord(event_, other_), cudaSuccess);
        ASSERT_EQ(cudaStreamWaitEvent(stream_, event_), cudaSuccess);
      }
      if (work) on(other_, [] {});  // after the join, if there is one
      EXPECT_EQ(end(), work ? cudaErrorStreamCaptureUnjoined : cudaSuccess) << work << join;
      expect_usable(stream_);
      expect_usable(other_);
    }
  }
}

TEST_P(Captures, BeginAndEndInOneStreamAndThread) {
  EXPECT_EQ(end(), cudaErrorIllegalState);
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeRelaxed), cudaErrorStreamCaptureUnsupported);
  begin();
  EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), cudaErrorIllegalState);
  EXPECT_EQ(in_another_thread([&] { return end(); }), cudaErrorStreamCaptureWrongThread);
  EXPECT_EQ(end(), cudaSuccess);
  begin(cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(in_another_thread([&] { return end(); }), cudaSuccess);
  expect_forbidden("in a forked stream", cudaErrorStreamCaptureUnmatched, [&] {
    EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(other_, event_), cudaSuccess);
    return end(other_);
  });
}

TEST_P(Captures, OfABlockingStreamForbidTheDefaultStream) {
  const auto use = [] {
    return cudaLaunchHostFunc(
        nullptr, [](void*) {}, nullptr);
  };
  expect_allowed("a non-blocking stream", use);
  stream_ = new_stream(cudaStreamDefault);
  expect_forbidden("a blocking stream", cudaErrorStreamCaptureImplicit, use);
  begin();
  cudaStreamCaptureStatus status;
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(end(), cudaSuccess) << "asking invalidates nothing";
}

TEST_P(Captures, HoldNoGraphs) {
  begin();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  begin();
  EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaErrorNotSupported);
  EXPECT_EQ(cudaGraphLaunch(executable, other_), cudaSuccess) << "beside a capture it runs";
  EXPECT_EQ(end(), cudaSuccess);
  ASSERT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
}

TEST_P(Captures, EndWithTheirStreams) {
  cudaStream_t forked = nullptr;
  expect_forbidden("a forked stream is destroyed", cudaSuccess, [&] {
    cudaStreamCreateWithFlags(&forked, cudaStreamNonBlocking);
    EXPECT_EQ(cudaEventRecord(event_, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(forked, event_), cudaSuccess);
    return cudaStreamDestroy(forked);
  });
  cudaStream_t origin = nullptr;
  cudaStreamCreateWithFlags(&origin, cudaStreamNonBlocking);
  ASSERT_EQ(cudaStreamBeginCapture(origin, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event_, origin), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(other_, event_), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(origin), cudaSuccess);
  expect_usable(other_);
}

INSTANTIATE_TEST_SUITE_P(Modes, Captures, ::testing::Values("threads", "seed:1"));

}  // namespace
}  // namespace minillm
