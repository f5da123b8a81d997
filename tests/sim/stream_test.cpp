// Streams, events, host functions and the two ways of scheduling them.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "streams_fixture.h"

namespace minillm {
namespace {

TEST_P(Streams, OperationsOfOneStreamKeepTheirOrder) {
  const cudaStream_t stream = new_stream();
  std::vector<int> log;
  for (int i = 0; i < 100; ++i) on(stream, [&log, i] { log.push_back(i); });
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  ASSERT_EQ(log.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(log[i], i);
}

TEST_P(Streams, EventWaitHoldsLaterWorkUntilTheMostRecentRecord) {
  const cudaStream_t first = new_stream(), second = new_stream();
  const cudaEvent_t event = new_event();
  for (int round = 0; round < 20; ++round) {
    int value = 0, seen = -1;
    on(first, [&] { value = 1; });
    ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
    on(first, [&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      value = 2;
    });
    ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(second, event), cudaSuccess);
    on(second, [&] { seen = value; });
    ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
    EXPECT_EQ(seen, 2);
  }
}

TEST_P(Streams, LaterRecordDoesNotMoveAnEarlierWait) {
  const cudaStream_t first = new_stream(), second = new_stream();
  const cudaEvent_t event = new_event();
  std::atomic<bool> second_ran = false;
  ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second, event), cudaSuccess);
  on(second, [&] { second_ran = true; });
  ASSERT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  // If the wait meant this record, the synchronisation above would already have needed it.
  on(first, [&] { EXPECT_TRUE(second_ran); });
  ASSERT_EQ(cudaEventRecord(event, first), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(event), cudaSuccess);
}

TEST_P(Streams, EventNeverRecordedIsNoWait) {
  const cudaStream_t stream = new_stream();
  const cudaEvent_t event = new_event();
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

TEST_P(Streams, QueriesEndWithTheWork) {
  const cudaStream_t stream = new_stream();
  const cudaEvent_t event = new_event();
  std::atomic<int> done = 0;
  for (int i = 0; i < 5; ++i) on(stream, [&] { ++done; });
  ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  while (cudaEventQuery(event) == cudaErrorNotReady) std::this_thread::yield();
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
  EXPECT_EQ(done, 5);
  on(stream, [&] { ++done; });
  while (cudaStreamQuery(stream) == cudaErrorNotReady) std::this_thread::yield();
  EXPECT_EQ(done, 6);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an unfinished query is no error";
}

TEST_P(Streams, ElapsedTimeIsThatOfTheWorkBetween) {
  const cudaStream_t stream = new_stream();
  const cudaEvent_t start = new_event(), end = new_event(), untimed = new_event(cudaEventDisableTiming);
  cudaEventRecord(start, stream);
  on(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); });
  cudaEventRecord(end, stream);
  cudaEventRecord(untimed, stream);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  float milliseconds = 0;
  ASSERT_EQ(cudaEventElapsedTime(&milliseconds, start, end), cudaSuccess);
  EXPECT_GE(milliseconds, 5.0f);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, start, untimed), cudaErrorInvalidResourceHandle);
}

TEST_P(Streams, DefaultStreamTakesTurnsWithBlockingStreamsOnly) {
  const cudaStream_t blocking = new_stream(cudaStreamDefault);
  std::vector<int> log;
  on(blocking, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    log.push_back(1);
  });
  on(nullptr, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    log.push_back(2);
  });
  on(blocking, [&] { log.push_back(3); });
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(log, (std::vector<int>{1, 2, 3}));
}

TEST_P(Streams, HostFunctionThatThrowsIsAStickyErrorWithItsText) {
  const cudaStream_t stream = new_stream(), other = new_stream();
  bool skipped = true;
  std::atomic<bool> all_enqueued = false;
  on(stream, [&] {
    while (!all_enqueued) std::this_thread::yield();
    throw std::runtime_error("ranks 0 and 1 disagree");
  });
  on(stream, [&] { skipped = false; });
  all_enqueued = true;
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorUnknown);
  EXPECT_STREQ(cudaGetErrorString(cudaErrorUnknown), "ranks 0 and 1 disagree");
  EXPECT_TRUE(skipped);
  EXPECT_EQ(cudaStreamSynchronize(other), cudaErrorUnknown);
}

TEST_P(Streams, HandlesAreChecked) {
  const auto bogus_stream = reinterpret_cast<cudaStream_t>(this);
  const auto bogus_event = reinterpret_cast<cudaEvent_t>(this);
  EXPECT_EQ(cudaStreamSynchronize(bogus_stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(bogus_event, nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamWaitEvent(nullptr, bogus_event), cudaErrorInvalidResourceHandle);
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

TEST_P(Streams, PageableSourceMayBeReusedAtOnceAndPageableTargetIsCompleteOnReturn) {
  const cudaStream_t stream = new_stream();
  Array<int> device(1);
  int source = 1, target = 0;
  on(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); });
  ASSERT_EQ(cudaMemcpyAsync(device.get(), &source, sizeof source, cudaMemcpyHostToDevice, stream),
            cudaSuccess);
  source = 2;
  ASSERT_EQ(cudaMemcpyAsync(&target, device.get(), sizeof target, cudaMemcpyDeviceToHost, stream),
            cudaSuccess);
  EXPECT_EQ(target, 1);
}

INSTANTIATE_TEST_SUITE_P(Modes, Streams, ::testing::Values("threads", "seed:1", "seed:2"));

// --- the seeded scheduler ---------------------------------------------------------------------------------

/// Who ran when. The streams that write it are not ordered with each other.
struct Log {
  std::atomic<size_t> length = 0;
  std::array<std::atomic<int>, 30> values;
};
struct Append {
  Log* log;
  int value;
};
void append(void* argument) {
  const auto& [log, value] = *static_cast<Append*>(argument);
  log->values[log->length.fetch_add(1, std::memory_order_relaxed)].store(value, std::memory_order_relaxed);
}

/// The order in which operations of three streams run; stream 2 waits for stream 1 half way.
std::vector<int> interleaving(const char* mode) {
  sim::set_streams(mode);
  std::vector<cudaStream_t> streams(3);
  for (auto& stream : streams) cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaEvent_t event = nullptr;
  cudaEventCreate(&event);
  Log log;
  std::vector<Append> appends;
  for (int i = 0; i < 30; ++i) appends.push_back({&log, i % 3 * 100 + i / 3});
  for (int i = 0; i < 30; ++i) {
    if (i == 15) {
      cudaEventRecord(event, streams[1]);
      cudaStreamWaitEvent(streams[2], event);
    }
    cudaLaunchHostFunc(streams[i % 3], append, &appends[i]);
  }
  EXPECT_EQ(log.length, 0u) << "nothing runs before the host waits";
  cudaDeviceSynchronize();
  cudaEventDestroy(event);
  for (auto stream : streams) cudaStreamDestroy(stream);
  sim::set_streams("threads");
  return {log.values.begin(), log.values.begin() + log.length};
}

TEST(SeededScheduler, IsAFunctionOfTheSeedAndRespectsOrder) {
  std::vector<std::vector<int>> logs;
  for (int seed = 0; seed < 8; ++seed) {
    const std::string mode = "seed:" + std::to_string(seed);
    const auto log = interleaving(mode.c_str());
    EXPECT_EQ(interleaving(mode.c_str()), log);
    ASSERT_EQ(log.size(), 30u);
    std::vector<int> next(3, 0);
    for (int value : log) {
      EXPECT_EQ(value % 100, next[value / 100]++) << "stream order";
      if (value == 205) {
        EXPECT_GE(next[1], 5) << "event order";
      }
    }
    logs.push_back(log);
  }
  std::sort(logs.begin(), logs.end());
  EXPECT_GE(std::unique(logs.begin(), logs.end()) - logs.begin(), 7) << "seeds differ";
}

TEST(SeededScheduler, ModeCannotChangeUnderLivingStreams) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_THROW(sim::set_streams("seed:1"), std::logic_error);
  EXPECT_EQ(sim::settings().streams.kind, sim::Streams::Kind::kThreads);
  cudaStreamDestroy(stream);
  EXPECT_THROW(sim::set_streams("seed:x"), UsageError);
  EXPECT_THROW(sim::set_order("backward"), UsageError);
  EXPECT_THROW(sim::set_workers(0), UsageError);
  EXPECT_THROW(sim::set_memory(0), UsageError);
  for (const char* version : {"2.30", "2.30.7.1", "2.30.", "2.30.x", "2.100.7", ""})
    EXPECT_THROW(sim::set_nccl_version(version), UsageError) << version;
}

}  // namespace
}  // namespace minillm
