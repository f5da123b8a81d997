// Device memory: poison, capacity, ranges, counters; and the bf16 conversions.
#include <cuda_bf16.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "device_fixture.h"
#include "sim/counters.h"

namespace minillm {
namespace {

TEST(Memory, FreshMemoryIsPoisoned) {
  const auto bytes = Array<unsigned char>(1001).read();
  for (unsigned char byte : bytes) EXPECT_EQ(byte, 0xff);
  EXPECT_TRUE(std::isnan(Array<float>(1).read()[0]));
}

TEST(Memory, CapacityIsEnforcedAndReported) {
  const int64_t before = sim::settings().memory_bytes;
  sim::set_memory(1 << 20);
  size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total, size_t{1} << 20);
  EXPECT_EQ(free, total);
  void *large = nullptr, *small = nullptr;
  ASSERT_EQ(cudaMalloc(&large, 1'000'000), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&small, 48'577), cudaErrorMemoryAllocation);
  EXPECT_EQ(small, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaMalloc(&small, 48'576), cudaSuccess);
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(free, 0u);
  EXPECT_EQ(cudaFree(large), cudaSuccess);
  EXPECT_EQ(cudaFree(small), cudaSuccess);
  sim::set_memory(before);
}

TEST(Memory, PeakIsCounted) {
  sim::reset_counters();
  const int64_t before = sim::counters().allocated_bytes;
  {
    Array<char> a(1000);
    { Array<char> b(500); }
    Array<char> c(200);
    EXPECT_EQ(sim::counters().allocated_bytes - before, 1200);
  }
  EXPECT_EQ(sim::counters().allocated_bytes, before);
  EXPECT_EQ(sim::counters().peak_bytes - before, 1500);
  sim::count_collective("all_gather", 64);
  sim::count_collective("all_gather", 36);
  EXPECT_EQ(sim::counters().collectives.at("all_gather").calls, 2);
  EXPECT_EQ(sim::counters().collectives.at("all_gather").bytes, 100);
  sim::reset_counters();
  EXPECT_TRUE(sim::counters().collectives.empty());
}

TEST(Counters, WhatTheHostAsksFor) {
  sim::reset_counters();
  const auto expect = [](int64_t allocations, int64_t objects, int64_t host_waits) {
    EXPECT_EQ(sim::counters().allocations, allocations);
    EXPECT_EQ(sim::counters().objects, objects);
    EXPECT_EQ(sim::counters().host_waits, host_waits);
  };
  float *memory = nullptr, *pinned = nullptr, pageable = 0;
  ASSERT_EQ(cudaMalloc(&memory, sizeof(float)), cudaSuccess);
  ASSERT_EQ(cudaMallocHost(&pinned, sizeof(float)), cudaSuccess);
  expect(2, 0, 0);
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  expect(2, 2, 0);
  ASSERT_EQ(cudaMemcpyAsync(pinned, memory, sizeof(float), cudaMemcpyDeviceToHost, stream), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream), cudaSuccess);
  expect(2, 2, 0);
  ASSERT_EQ(cudaEventSynchronize(event), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  expect(2, 2, 2);
  ASSERT_EQ(cudaMemcpyAsync(&pageable, memory, sizeof(float), cudaMemcpyDeviceToHost, stream), cudaSuccess);
  expect(2, 2, 3);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  ASSERT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST(Memory, UnknownPointersAndWrongKindsAreErrors) {
  int on_stack = 0;
  EXPECT_EQ(cudaFree(&on_stack), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, 8), cudaSuccess);
  EXPECT_EQ(cudaFree(pinned), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(pinned), cudaErrorInvalidValue);
  cudaGetLastError();
}

TEST(Memory, CopiesCheckRangeAndDirection) {
  Array<int> a(4);
  int host[8] = {};
  EXPECT_EQ(cudaMemcpy(a.get(), host, 20, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, a.get() + 2, 12, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(a.get(), host, 16, cudaMemcpyDeviceToDevice), cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaMemcpy(host, a.get(), 16, cudaMemcpyHostToDevice), cudaErrorInvalidMemcpyDirection);
  EXPECT_EQ(cudaMemset(a.get() + 1, 0, 16), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(host, 0, 16), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(a.get(), host, 16, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(cudaMemset(a.get() + 1, 1, 8), cudaSuccess);
  EXPECT_EQ(a.read(), (std::vector<int>{0, 0x01010101, 0x01010101, 0}));
  EXPECT_EQ(cudaMemcpy(a.get(), host, 20, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_STREQ(cudaGetErrorString(cudaGetLastError()), "invalid argument");
}

TEST(Device, DescribesItself) {
  cudaDeviceProp properties;
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_STREQ(properties.name, "Simulated device");
  int value = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(value, properties.multiProcessorCount);
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 1), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

// --- bf16 -------------------------------------------------------------------------------------------------

TEST(Bfloat16, EveryValueSurvivesARoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = __ushort_as_bfloat16(static_cast<unsigned short>(bits));
    const float wide = __bfloat162float(value);
    const uint32_t expected = std::isnan(wide) ? 0x7fff : bits;
    ASSERT_EQ(__bfloat16_as_ushort(__float2bfloat16(wide)), expected);
  }
}

TEST(Bfloat16, RoundsToNearestEven) {
  const auto bits = [](float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); };
  const auto from = [](uint32_t b) { return std::bit_cast<float>(b); };
  EXPECT_EQ(bits(from(0x3f808000)), 0x3f80);  // a tie goes to the even one below…
  EXPECT_EQ(bits(from(0x3f818000)), 0x3f82);  // …or above
  EXPECT_EQ(bits(from(0x3f807fff)), 0x3f80);
  EXPECT_EQ(bits(from(0x3f808001)), 0x3f81);
  EXPECT_EQ(bits(from(0x7f7fffff)), 0x7f80);  // the largest float rounds to infinity
  EXPECT_EQ(bits(-std::numeric_limits<float>::infinity()), 0xff80);
  EXPECT_EQ(bits(from(0x7f800001)), 0x7fff);  // a NaN whose upper bits alone would be infinity
  EXPECT_EQ(bits(from(0x00000001)), 0x0000);
  EXPECT_EQ(bits(-0.0f), 0x8000);
}

TEST(Bfloat16, PairsKeepLowAndHigh) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.0f);
  static_assert(sizeof pair == 4 && alignof(__nv_bfloat162) == 4);
  EXPECT_EQ(__low2float(pair), 1.5f);
  EXPECT_EQ(__high2float(pair), -2.0f);
  EXPECT_EQ(__bfloat1622float2(pair).y, -2.0f);
  EXPECT_EQ(std::bit_cast<uint32_t>(pair), 0xc0003fc0u);
}

}  // namespace
}  // namespace minillm
