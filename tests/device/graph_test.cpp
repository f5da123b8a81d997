// Graphs: replays give what eager work gives, on what the memory holds then; captures that fail leave no
// trace.
#include "cuda/graph.h"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/gemm.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "kernels/cast.h"
#include "kernels/silu.h"
#if !defined(CUDART_VERSION)
#include "sim/counters.h"
#endif

namespace minillm::cuda {
namespace {

constexpr int64_t kRows = 48, kColumns = 40, kDepth = 56;

/// Work of all kinds on two streams: an upload, a kernel, then a product on each stream, and a sum of both
/// that is downloaded.
class Work {
 public:
  Work() {
    for (int64_t i = 0; i < kDepth * kColumns; ++i) weight()[i] = static_cast<float>(i % 13 - 6) / 8;
    check(cudaMemcpy(weight_.data(), host_weight_.data(), static_cast<size_t>(weight_.bytes()),
                     cudaMemcpyHostToDevice));
  }

  void set_input(int seed) {
    auto* input = reinterpret_cast<float*>(host_input_.data());
    for (int64_t i = 0; i < kRows * kDepth; ++i)
      input[i] = static_cast<float>((i * 7 + seed * 31) % 29 - 14) / 4;
  }

  void enqueue(cudaStream_t stream) {
    check(cudaMemcpyAsync(input_.data(), host_input_.data(), static_cast<size_t>(input_.bytes()),
                          cudaMemcpyHostToDevice, stream));
    uploaded_.record(stream);
    uploaded_.wait_on(side_.get());
    kernels::silu_forward({activated_.data(), input_.data(), kRows * kDepth, DType::kFp32}, stream);
    product(blas_, activated_, first_, stream);
    product(side_blas_, input_, second_, side_.get());
    joined_.record(side_.get());
    joined_.wait_on(stream);
    kernels::cast({rounded_.data(), first_.data(), kRows * kColumns, DType::kBf16, DType::kFp32}, stream);
    download(rounded_, 0, stream);
    download(second_, rounded_.bytes(), stream);
  }

  std::vector<std::byte> output() const {
    return {host_output_.data(), host_output_.data() + host_output_.bytes()};
  }

 private:
  float* weight() { return reinterpret_cast<float*>(host_weight_.data()); }

  void product(BlasLt& blas, const DeviceMemory& left, const DeviceMemory& out, cudaStream_t stream) {
    Gemm gemm;
    gemm.m = kRows, gemm.n = kColumns, gemm.k = kDepth;
    gemm.a = left.data(), gemm.b = weight_.data(), gemm.d = out.data();
    gemm.input = gemm.output = DType::kFp32;
    blas.run(gemm, stream);
  }
  void download(const DeviceMemory& memory, int64_t offset, cudaStream_t stream) {
    check(cudaMemcpyAsync(host_output_.data() + offset, memory.data(), static_cast<size_t>(memory.bytes()),
                          cudaMemcpyDeviceToHost, stream));
  }

  PinnedMemory host_input_{kRows * kDepth * 4}, host_weight_{kDepth * kColumns * 4};
  PinnedMemory host_output_{kRows * kColumns * 6};
  DeviceMemory input_{kRows * kDepth * 4}, activated_{kRows * kDepth * 4}, weight_{kDepth * kColumns * 4};
  DeviceMemory first_{kRows * kColumns * 4}, second_{kRows * kColumns * 4}, rounded_{kRows * kColumns * 2};
  DeviceMemory workspace_{BlasLt::workspace_bytes()}, side_workspace_{BlasLt::workspace_bytes()};
  BlasLt blas_{workspace_.data()}, side_blas_{side_workspace_.data()};
  Stream side_;
  Event uploaded_, joined_;
};

TEST(Graph, ReplaysGiveTheBitsOfEagerWork) {
  constexpr int kReplays = 100, kInputs = 5;
  const Stream stream, other;
  Work work;
  std::vector<std::vector<std::byte>> eager;
  for (int seed = 0; seed < kInputs; ++seed) {
    work.set_input(seed);
    work.enqueue(stream.get());
    stream.synchronize();
    eager.push_back(work.output());
  }
  ASSERT_NE(eager[0], eager[1]);
  work.set_input(kInputs);
  const Graph graph = Graph::capture(stream.get(), [&] { work.enqueue(stream.get()); });
  stream.synchronize();
  EXPECT_EQ(work.output(), eager.back()) << "nothing runs in a capture";
  for (int replay = 0; replay < kReplays; ++replay) {
    const Stream& launched = replay % 3 == 0 ? other : stream;
    work.set_input(replay % kInputs);
    graph.launch(launched.get());
    launched.synchronize();
    ASSERT_EQ(work.output(), eager[static_cast<size_t>(replay % kInputs)]) << "replay " << replay;
  }
  work.set_input(1);
  work.enqueue(stream.get());
  stream.synchronize();
  EXPECT_EQ(work.output(), eager[1]) << "the streams take work as before";
}

/// A number on the device that grows by one with each grow(): the order and number of launches show in it.
class Number {
 public:
  Number() {
    const float one = 1, zero = 0;
    check(cudaMemcpy(one_.data(), &one, sizeof one, cudaMemcpyHostToDevice));
    check(cudaMemcpy(value_.data(), &zero, sizeof zero, cudaMemcpyHostToDevice));
  }
  void grow(cudaStream_t stream) {
    Gemm gemm;
    gemm.m = gemm.n = gemm.k = 1;
    gemm.a = gemm.b = one_.data();
    gemm.c = gemm.d = value_.data();
    gemm.beta = 1;
    gemm.input = gemm.output = DType::kFp32;
    blas_.run(gemm, stream);
  }
  float read() const {
    float value = -1;
    check(cudaMemcpy(&value, value_.data(), sizeof value, cudaMemcpyDeviceToHost));
    return value;
  }

 private:
  DeviceMemory one_{4}, value_{4}, workspace_{BlasLt::workspace_bytes()};
  BlasLt blas_{workspace_.data()};
};

TEST(Graph, LaunchesFollowEachOtherWithoutTheHost) {
  const Stream stream, other;
  Number number;
  number.grow(stream.get());
  const Graph graph = Graph::capture(stream.get(), [&] {
    for (int i = 0; i < 3; ++i) number.grow(stream.get());
  });
  for (int i = 0; i < 100; ++i) graph.launch(i % 2 == 0 ? stream.get() : other.get());
  other.synchronize();
  stream.synchronize();
  EXPECT_EQ(number.read(), 301);
}

#if !defined(CUDART_VERSION)
TEST(Graph, KeepsThePrioritiesOfTheStreams) {
  const Stream stream;
  Number number;
  number.grow(stream.get());
  const int64_t before = sim::counters().node_priority_graphs;
  const Graph graph = Graph::capture(stream.get(), [&] { number.grow(stream.get()); });
  EXPECT_EQ(sim::counters().node_priority_graphs, before + 1);
}
#endif

TEST(Graph, MayBeMoved) {
  const Stream stream;
  Number one, two;
  one.grow(stream.get());
  two.grow(stream.get());
  Graph graph = Graph::capture(stream.get(), [&] { one.grow(stream.get()); });
  Graph moved(std::move(graph));
  moved.launch(stream.get());
  moved = Graph::capture(stream.get(), [&] { two.grow(stream.get()); });
  for (int i = 0; i < 4; ++i) moved.launch(stream.get());
  stream.synchronize();
  EXPECT_EQ(one.read(), 2);
  EXPECT_EQ(two.read(), 5);
}

TEST(Graph, CaptureThatThrowsLeavesTheStreamsUsable) {
  const Stream stream, side;
  const Event forked;
  Number number;
  number.grow(stream.get());
  const auto fails = [&] {
    number.grow(stream.get());
    forked.record(stream.get());
    forked.wait_on(side.get());
    number.grow(side.get());
    throw std::runtime_error("not today");
  };
  try {
    (void)Graph::capture(stream.get(), fails);
    FAIL() << "the exception was swallowed";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "not today");
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  number.grow(stream.get());
  stream.synchronize();
  number.grow(side.get());
  side.synchronize();
  EXPECT_EQ(number.read(), 3) << "nothing of the failed capture ran";
  const Graph graph = Graph::capture(stream.get(), [&] { number.grow(stream.get()); });
  graph.launch(stream.get());
  stream.synchronize();
  EXPECT_EQ(number.read(), 4);
}

/// What `work` in a capture of `stream` throws; then that the stream takes work again.
std::string capture_error(const Stream& stream, const std::function<void()>& work) {
  std::string text = "nothing was thrown";
  try {
    (void)Graph::capture(stream.get(), work);
  } catch (const DeviceError& error) {
    text = error.what();
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  stream.synchronize();
  return text;
}

TEST(Graph, WhatCannotBeCapturedIsAnError) {
  const Stream stream, side;
  const Event event;
  const auto expect = [&](const char* name, const std::function<void()>& work) {
    const std::string text = capture_error(stream, work);
    EXPECT_NE(text.find(name), std::string::npos) << text;
    side.synchronize();
  };
  expect("cudaErrorStreamCaptureUnsupported", [&] { stream.synchronize(); });
  expect("cudaErrorStreamCaptureUnsupported", [&] { DeviceMemory memory(100); });
  expect("cudaErrorStreamCaptureInvalidated", [&] { (void)cudaStreamSynchronize(stream.get()); });
  expect("cudaErrorStreamCaptureIsolation", [&] {
    event.record(side.get());
    event.wait_on(stream.get());
  });
  const DeviceMemory memory(100);
  expect("cudaErrorStreamCaptureUnjoined", [&] {
    event.record(stream.get());
    event.wait_on(side.get());
    check(cudaMemsetAsync(memory.data(), 0, 100, side.get()));
  });
}

}  // namespace
}  // namespace minillm::cuda
