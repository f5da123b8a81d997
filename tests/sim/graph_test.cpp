// Graphs: what is captured, the order in which replays run it, and the counters.
#include <array>
#include <atomic>
#include <chrono>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "sim/counters.h"
#include "streams_fixture.h"

namespace minillm {
namespace {

/// Executable graphs for a test, destroyed with it.
class Graphs : public Streams {
 protected:
  ~Graphs() override {
    for (cudaGraphExec_t graph : graphs_) EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
    sim::set_delay(std::nullopt);
  }
  void begin(cudaStream_t stream) {
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  }
  cudaGraphExec_t end(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    const cudaGraphExec_t executable = instantiate(graph);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return executable;
  }
  cudaGraphExec_t instantiate(cudaGraph_t graph) {
    cudaGraphExec_t executable = nullptr;
    EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    graphs_.push_back(executable);
    return executable;
  }
  /// `to` waits for what is on `from` now.
  void order(cudaStream_t from, cudaStream_t to) {
    const cudaEvent_t event = new_event(cudaEventDisableTiming);
    ASSERT_EQ(cudaEventRecord(event, from), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(to, event), cudaSuccess);
  }

 private:
  std::vector<cudaGraphExec_t> graphs_;
};

__global__ void add_one(int* value) {
  if (threadIdx.x == 0) ++*value;
}

TEST_P(Graphs, RunWhenLaunchedAndOnlyThen) {
  const cudaStream_t stream = new_stream();
  Array<int> value(std::vector{41}), copy(std::vector{0});
  int calls = 0;
  begin(stream);
  kernels::launch("add_one", add_one, {dim3(1), dim3(32), 0, stream}, value.get());
  ASSERT_EQ(cudaMemcpyAsync(copy.get(), value.get(), sizeof(int), cudaMemcpyDeviceToDevice, stream),
            cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(value.get(), 0, 1, stream), cudaSuccess);
  on(stream, [&] { ++calls; });
  const cudaGraphExec_t graph = end(stream);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(copy.read(), std::vector<int>{0});
  for (int replay = 1; replay <= 100; ++replay) {
    const int before = 1000 * replay;
    cudaMemcpy(value.get(), &before, sizeof before, cudaMemcpyHostToDevice);
    ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    ASSERT_EQ(copy.read()[0], before + 1);
    ASSERT_EQ(value.read()[0], (before + 1) & ~0xff);
    ASSERT_EQ(calls, replay);
  }
}

TEST_P(Graphs, CountersCountLaunchesOfTheGraph) {
  const cudaStream_t stream = new_stream();
  Array<int> value(std::vector{0});
  sim::reset_counters();
  begin(stream);
  for (int i = 0; i < 2; ++i)
    kernels::launch("add_one", add_one, {dim3(1), dim3(32), 0, stream}, value.get());
  const cudaGraphExec_t graph = end(stream);
  EXPECT_EQ(sim::counters().launches.count("add_one"), 0u);
  for (int replay = 0; replay < 3; ++replay) cudaGraphLaunch(graph, stream);
  EXPECT_EQ(sim::counters().launches["add_one"], 6);
  cudaStreamSynchronize(stream);
  EXPECT_EQ(value.read()[0], 6);
}

/// Three branches: the second forks from the first after `a`, the third from the second without any operation
/// before; both join. Each operation tells its place in the order of all.
TEST_P(Graphs, OperationsKeepTheOrderOfTheirCapture) {
  if (std::string(GetParam()) == "threads") sim::set_delay(3);
  const cudaStream_t first = new_stream(), second = new_stream(), third = new_stream();
  std::atomic<int> clock = 0;
  enum Name { kA, kB, kC, kD, kE, kF, kEnd, kNames };
  std::array<std::atomic<int>, kNames> time{};
  const auto stamp = [&](cudaStream_t stream, Name name) {
    on(stream, [&time, &clock, name] { time[name] = ++clock; });
  };
  begin(first);
  stamp(first, kA);
  order(first, second);
  order(second, third);
  stamp(third, kB);
  stamp(second, kC);
  stamp(first, kD);
  order(third, second);
  stamp(second, kE);
  stamp(first, kF);
  order(second, first);
  stamp(first, kEnd);
  const cudaGraphExec_t graph = end(first);
  std::set<bool> branches_in_order;
  for (int replay = 0; replay < 30; ++replay) {
    ASSERT_EQ(cudaGraphLaunch(graph, second), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
    ASSERT_EQ(clock, kNames * (replay + 1)) << "every operation, once";
    for (const auto& [earlier, later] :
         {std::pair{kA, kB}, {kA, kC}, {kA, kD}, {kB, kE}, {kC, kE}, {kD, kF}, {kE, kEnd}, {kF, kEnd}})
      EXPECT_LT(time[earlier], time[later]) << earlier << " before " << later;
    branches_in_order.insert(time[kC] < time[kD]);
  }
  if (std::string(GetParam()) != "threads") {
    EXPECT_EQ(branches_in_order.size(), 2u) << "the seed draws which branch is first, anew for each launch";
  }
}

TEST(GraphBranches, RunAtTheSameTime) {
  cudaStream_t streams[2];
  cudaEvent_t event = nullptr;
  for (auto& stream : streams) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaEventCreate(&event);
  struct Meeting {
    std::atomic<int> arrived = 0, met = 0;
  } meeting;
  const auto meet = [](void* argument) {
    auto& meeting = *static_cast<Meeting*>(argument);
    ++meeting.arrived;
    const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (meeting.arrived % 2 != 0 && std::chrono::steady_clock::now() < late) std::this_thread::yield();
    if (meeting.arrived % 2 == 0) ++meeting.met;
  };
  cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed);
  cudaEventRecord(event, streams[0]);
  cudaStreamWaitEvent(streams[1], event);
  for (auto& stream : streams) cudaLaunchHostFunc(stream, meet, &meeting);
  cudaEventRecord(event, streams[1]);
  cudaStreamWaitEvent(streams[0], event);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(streams[0], &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int replay = 0; replay < 5; ++replay) cudaGraphLaunch(executable, streams[0]);
  cudaStreamSynchronize(streams[0]);
  EXPECT_EQ(meeting.met, 10) << "each waits for the other";
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(event);
  for (auto& stream : streams) cudaStreamDestroy(stream);
}

TEST_P(Graphs, TakeTheirTurnInTheStreamOfTheLaunch) {
  const cudaStream_t captured = new_stream(), side = new_stream();
  std::vector<int> log;
  begin(captured);
  order(captured, side);
  on(side, [&] {
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    log.push_back(1);
  });
  order(side, captured);
  const cudaGraphExec_t graph = end(captured);
  const cudaStream_t launched = new_stream(cudaStreamDefault);
  for (const cudaStream_t stream : {launched, cudaStream_t{nullptr}}) {
    log.clear();
    for (int round = 0; round < 3; ++round) {
      on(stream, [&] {
        std::this_thread::sleep_for(std::chrono::microseconds(300));
        log.push_back(0);
      });
      ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
      on(launched, [&] { log.push_back(2); });  // ordered with the default stream, too
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(log, (std::vector<int>{0, 1, 2, 0, 1, 2, 0, 1, 2}));
  }
}

TEST_P(Graphs, LaunchesOfOneGraphFollowEachOther) {
  const cudaStream_t first = new_stream(), second = new_stream();
  int running = 0, together = 0, runs = 0;  // no atomics: ThreadSanitizer checks the order, too
  begin(first);
  on(first, [&] { together += running++; });
  on(first, [&] { std::this_thread::sleep_for(std::chrono::microseconds(200)); });
  on(first, [&] { --running, ++runs; });
  const cudaGraphExec_t graph = end(first);
  for (int i = 0; i < 10; ++i) ASSERT_EQ(cudaGraphLaunch(graph, i % 2 ? first : second), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(runs, 10);
  EXPECT_EQ(together, 0);
}

TEST_P(Graphs, ExecutablesOfOneGraphAreIndependentOfItAndOfEachOther) {
  const cudaStream_t stream = new_stream();
  std::atomic<int> calls = 0;
  begin(stream);
  on(stream, [&] { ++calls; });
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  const cudaGraphExec_t one = instantiate(graph), two = instantiate(graph);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaErrorInvalidValue);
  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(cudaGraphLaunch(one, stream), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(two, new_stream()), cudaSuccess);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(calls, 10);
}

TEST_P(Graphs, DestroyWaitsForTheLaunch) {
  const cudaStream_t stream = new_stream();
  std::atomic<bool> done = false;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  begin(stream);
  on(stream, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    done = true;
  });
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  ASSERT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_TRUE(done);
  EXPECT_EQ(cudaGraphLaunch(executable, stream), cudaErrorInvalidValue);
}

TEST_P(Graphs, AnEmptyOneIsNoWork) {
  const cudaStream_t stream = new_stream();
  begin(stream);
  const cudaGraphExec_t graph = end(stream);
  EXPECT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

TEST_P(Graphs, ExternalEventsAreThoseOfTheLaunch) {
  const cudaStream_t captured = new_stream(), other = new_stream();
  const cudaEvent_t before = new_event(), after = new_event();
  std::vector<int> log;
  begin(captured);
  ASSERT_EQ(cudaStreamWaitEvent(captured, before, cudaEventWaitExternal), cudaSuccess);
  on(captured, [&] { log.push_back(1); });
  ASSERT_EQ(cudaEventRecordWithFlags(after, captured, cudaEventRecordExternal), cudaSuccess);
  on(captured, [] { std::this_thread::sleep_for(std::chrono::microseconds(500)); });
  const cudaGraphExec_t graph = end(captured);
  EXPECT_EQ(cudaEventQuery(after), cudaSuccess) << "capturing it records no event";
  for (int replay = 0; replay < 10; ++replay) {
    log.clear();
    on(other, [&] {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      log.push_back(0);
    });
    ASSERT_EQ(cudaEventRecord(before, other), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(graph, captured), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(other, after), cudaSuccess);
    on(other, [&] { log.push_back(2); });
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(log, (std::vector<int>{0, 1, 2}));
    ASSERT_EQ(cudaEventQuery(after), cudaSuccess);
  }
  EXPECT_EQ(cudaEventRecordWithFlags(after, captured, cudaEventRecordExternal), cudaErrorInvalidValue);
  EXPECT_EQ(cudaStreamWaitEvent(captured, after, cudaEventWaitExternal), cudaErrorInvalidValue);
  cudaGetLastError();
}

TEST_P(Graphs, WithADestroyedEventCannotBeLaunched) {
  const cudaStream_t stream = new_stream();
  cudaEvent_t event = nullptr;
  cudaEventCreate(&event);
  begin(stream);
  cudaEventRecordWithFlags(event, stream, cudaEventRecordExternal);
  const cudaGraphExec_t graph = end(stream);
  cudaEventDestroy(event);
  EXPECT_EQ(cudaGraphLaunch(graph, stream), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

__global__ void fail_when_negative(const int* value) {
  if (*value < 0) throw std::runtime_error("the value is negative");
}

TEST_P(Graphs, FailureInAReplayIsTheDevices) {
  const cudaStream_t stream = new_stream();
  Array<int> value(std::vector{1});
  int after = 0;
  begin(stream);
  kernels::launch("fail_when_negative", fail_when_negative, {dim3(1), dim3(1), 0, stream}, value.get());
  on(stream, [&] { ++after; });
  const cudaGraphExec_t graph = end(stream);
  ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  ASSERT_EQ(cudaMemsetAsync(value.get(), 0xff, sizeof(int), stream), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
  const std::string text = cudaGetErrorString(cudaErrorLaunchFailure);
  EXPECT_NE(text.find("fail_when_negative"), std::string::npos) << text;
  EXPECT_NE(text.find("the value is negative"), std::string::npos) << text;
  EXPECT_EQ(cudaGraphLaunch(graph, stream), cudaErrorLaunchFailure);
  EXPECT_EQ(after, 1) << "what follows the failure is skipped";
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaErrorLaunchFailure);
  sim::clear_failure();
  ASSERT_EQ(cudaMemsetAsync(value.get(), 0, sizeof(int), stream), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(graph, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(after, 2);
}

TEST_P(Graphs, FailureDuringACaptureEndsItWithoutAGraph) {
  const cudaStream_t stream = new_stream(), other = new_stream();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  on(stream, [] {});
  on(other, [] { throw std::runtime_error("elsewhere"); });
  ASSERT_EQ(cudaStreamSynchronize(other), cudaErrorUnknown);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorUnknown);
  EXPECT_EQ(graph, nullptr);
  sim::clear_failure();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  EXPECT_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
}

TEST(GraphModes, CannotChangeUnderAnExecutableGraph) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  cudaStreamEndCapture(stream, &graph);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  cudaStreamDestroy(stream);
  EXPECT_THROW(sim::set_streams("seed:1"), std::logic_error);
  EXPECT_EQ(cudaGraphInstantiate(&executable, nullptr, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGraphInstantiate(&executable, graph, 1), cudaErrorNotSupported);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  sim::set_streams("seed:1");
  sim::set_streams("threads");
  cudaGetLastError();
}

INSTANTIATE_TEST_SUITE_P(Modes, Graphs, ::testing::Values("threads", "seed:1", "seed:2"));

}  // namespace
}  // namespace minillm
