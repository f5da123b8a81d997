// Virtual time: streams in order, waits honoured, resources shared.
#include "sim/clock.h"

#include <atomic>
#include <stdexcept>

#include "sim/control.h"
#include "streams_fixture.h"

namespace minillm {
namespace {

using sim::VirtualWork;
using Ends = std::vector<std::pair<int64_t, double>>;

// Times are whole or binary fractions of seconds, so that sums are exact.
class VirtualTime : public Streams {
 protected:
  static Ends ends() {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Ends ends;
    for (const auto& [tag, at_s] : sim::take_virtual_ends()) ends.emplace_back(tag, at_s);
    return ends;
  }
};

TEST_P(VirtualTime, OneStreamIsInOrder) {
  const cudaStream_t stream = new_stream();
  sim::enqueue_work(stream, {.tag = 1, .latency_s = 1, .busy_s = 2});
  sim::enqueue_work(stream, {.tag = 2, .busy_s = 0.5});
  sim::enqueue_work(stream, {.tag = 3, .latency_s = 0.25});
  EXPECT_EQ(ends(), (Ends{{1, 3}, {2, 3.5}, {3, 3.75}}));
  sim::enqueue_work(stream, {.tag = 4, .busy_s = 1});
  EXPECT_EQ(ends(), (Ends{{4, 4.75}})) << "time goes on";
}

TEST_P(VirtualTime, ResourcesAreSharedAndLatenciesAreNot) {
  const cudaStream_t a = new_stream(), b = new_stream(), c = new_stream();
  sim::enqueue_work(a, {.tag = 1, .busy_s = 4});
  sim::enqueue_work(b, {.tag = 2, .latency_s = 1, .busy_s = 2});  // with 1 from 1 to 5
  sim::enqueue_work(c, {.tag = 3, .resource = 1, .busy_s = 1.5});
  EXPECT_EQ(ends(), (Ends{{3, 1.5}, {2, 5}, {1, 6}}));
}

TEST_P(VirtualTime, WaitsHoldUpTimeAndWhatTakesNone) {
  const cudaStream_t first = new_stream(), second = new_stream();
  const cudaEvent_t begin = new_event(), event = new_event(), end = new_event();
  ASSERT_EQ(cudaEventRecord(begin, first), cudaSuccess);
  sim::enqueue_work(first, {.tag = 1, .busy_s = 3});
  std::atomic<bool> early = false, late = false;
  on(first, [&] { late = true; });
  ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
  on(second, [&] { early = !late; });
  ASSERT_EQ(cudaStreamWaitEvent(second, event), cudaSuccess);
  on(second, [&] { EXPECT_TRUE(late); });
  sim::enqueue_work(second, {.tag = 2, .busy_s = 2});
  ASSERT_EQ(cudaEventRecord(end, second), cudaSuccess);
  EXPECT_EQ(ends(), (Ends{{1, 3}, {2, 5}}));
  EXPECT_TRUE(early);
  float milliseconds = 0;
  ASSERT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_EQ(milliseconds, 5000);
}

TEST_P(VirtualTime, TheHostWaitsNoLongerThanItHasTo) {
  const cudaStream_t first = new_stream(), second = new_stream();
  sim::enqueue_work(first, {.tag = 1, .busy_s = 1});
  sim::enqueue_work(second, {.tag = 2, .resource = 1, .busy_s = 4});
  ASSERT_EQ(cudaStreamSynchronize(first), cudaSuccess);
  EXPECT_EQ(sim::take_virtual_ends().size(), 1u);
  EXPECT_EQ(cudaStreamQuery(first), cudaSuccess);
  sim::enqueue_work(first, {.tag = 3, .busy_s = 1});
  EXPECT_EQ(ends(), (Ends{{3, 2}, {2, 4}}));
}

TEST_P(VirtualTime, GraphsTakeItAtEachLaunch) {
  const cudaStream_t origin = new_stream(), branch = new_stream();
  const cudaEvent_t fork = new_event(), join = new_event();
  ASSERT_EQ(cudaStreamBeginCapture(origin, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(fork, origin), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(branch, fork), cudaSuccess);
  sim::enqueue_work(origin, {.tag = 1, .busy_s = 1});
  sim::enqueue_work(branch, {.tag = 2, .resource = 1, .busy_s = 2});
  ASSERT_EQ(cudaEventRecord(join, branch), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(origin, join), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(origin, &graph), cudaSuccess);
  EXPECT_EQ(ends(), Ends{});
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (int launch = 0; launch < 2; ++launch) {
    ASSERT_EQ(cudaGraphLaunch(executable, origin), cudaSuccess);
  }
  sim::enqueue_work(origin, {.tag = 3, .busy_s = 1});
  EXPECT_EQ(ends(), (Ends{{1, 1}, {2, 2}, {1, 3}, {2, 4}, {3, 5}}));
  EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(Clock, VirtualTime, ::testing::Values("clock"));

TEST(VirtualTimeMode, IsTheOnlyOneWithVirtualWork) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_THROW(sim::enqueue_work(stream, {.busy_s = 1}), std::logic_error);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace minillm
