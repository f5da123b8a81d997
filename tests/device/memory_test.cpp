// Owners of device memory, pinned memory, streams and events; the text of device errors.
#include "cuda/memory.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/stream.h"

namespace minillm::cuda {
namespace {

TEST(DeviceMemory, IsCountedWhileItLives) {
  const int64_t before = device_bytes_in_use();
  {
    DeviceMemory one(1000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(one.data()) % 256, 0u);
    DeviceMemory two(5000);
    EXPECT_EQ(device_bytes_in_use(), before + 6000);
    EXPECT_GE(device_bytes_peak(), before + 6000);
    DeviceMemory three(std::move(one));
    EXPECT_EQ(one.data(), nullptr);
    EXPECT_EQ(one.bytes(), 0);
    EXPECT_EQ(three.bytes(), 1000);
    EXPECT_EQ(device_bytes_in_use(), before + 6000);
    three = std::move(two);  // frees the 1000
    EXPECT_EQ(three.bytes(), 5000);
    EXPECT_EQ(device_bytes_in_use(), before + 5000);
    three = DeviceMemory();
    EXPECT_EQ(device_bytes_in_use(), before);
  }
  EXPECT_EQ(device_bytes_in_use(), before);
  EXPECT_GE(device_bytes_peak(), before + 6000);
}

TEST(DeviceMemory, OfAnotherAllocatorIsCountedAndGivenBack) {
  static std::byte data[300];
  static int given_back;
  given_back = 0;
  const int64_t before = device_bytes_in_use();
  {
    DeviceMemory taken(data, sizeof data, [](void* memory) { given_back += memory == data ? 1 : 100; });
    EXPECT_EQ(taken.data(), data);
    EXPECT_EQ(device_bytes_in_use(), before + 300);
    DeviceMemory moved(1000);
    moved = std::move(taken);  // frees the 1000 in CUDA's way
    EXPECT_EQ(device_bytes_in_use(), before + 300);
    EXPECT_EQ(given_back, 0);
  }
  EXPECT_EQ(given_back, 1);
  EXPECT_EQ(device_bytes_in_use(), before);
}

TEST(DeviceMemory, OfNoBytesIsEmpty) {
  EXPECT_EQ(DeviceMemory(0).data(), nullptr);
  EXPECT_THROW(DeviceMemory(-1), InternalError);
}

TEST(DeviceMemory, TooMuchIsAnErrorWithTheFigures) {
  const DeviceCapacity capacity = device_capacity();
  ASSERT_GT(capacity.free, 0);
  ASSERT_LE(capacity.free, capacity.total);
  const int64_t in_use = device_bytes_in_use();
  const int64_t asked = capacity.total + 1;
  try {
    DeviceMemory memory(asked);
    FAIL() << "more than the device has was given";
  } catch (const MemoryError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(std::to_string(asked) + " bytes were asked"), std::string::npos) << text;
    EXPECT_NE(text.find(std::to_string(capacity.total) + " bytes are free"), std::string::npos) << text;
  }
  EXPECT_EQ(device_bytes_in_use(), in_use);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// A kernel that is loaded at its first launch finds no memory, for example.
TEST(DeviceMemory, MissingMemoryIsAnErrorOfMemoryWhoeverAsks) {
  try {
    check(cudaErrorMemoryAllocation);
    FAIL() << "no error";
  } catch (const MemoryError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("raise memory.reserve"), std::string::npos) << text;
    EXPECT_NE(text.find("memory_test.cpp"), std::string::npos) << text;
  }
}

TEST(PinnedMemory, StartsAtZero) {
  PinnedMemory memory(777);
  for (int64_t i = 0; i < memory.bytes(); ++i) ASSERT_EQ(memory.data()[i], std::byte{0});
  PinnedMemory moved(std::move(memory));
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_EQ(moved.bytes(), 777);
  EXPECT_THROW(PinnedMemory(-1), InternalError);
}

TEST(Stream, EventsOrderStreams) {
  constexpr int64_t kBytes = 1 << 20;
  Stream first, second(StreamPriority::kHigh);
  const Event copied;
  const DeviceMemory device(kBytes);
  PinnedMemory source(kBytes), target(kBytes);
  for (int round = 1; round < 20; ++round) {
    source.data()[kBytes - 1] = static_cast<std::byte>(round);
    check(cudaMemcpyAsync(device.data(), source.data(), kBytes, cudaMemcpyHostToDevice, first.get()));
    copied.record(first.get());
    copied.wait_on(second.get());
    check(cudaMemcpyAsync(target.data(), device.data(), kBytes, cudaMemcpyDeviceToHost, second.get()));
    second.synchronize();
    ASSERT_EQ(target.data()[kBytes - 1], static_cast<std::byte>(round));
  }
  copied.synchronize();
  Stream moved(std::move(first));
  EXPECT_EQ(first.get(), nullptr);
  moved.synchronize();
}

TEST(Check, NamesPlaceAndCause) {
  check(cudaSuccess);
  try {
    check(cudaErrorInvalidValue);
    FAIL() << "nothing was thrown";
  } catch (const DeviceError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("memory_test.cpp:"), std::string::npos) << text;
    EXPECT_NE(text.find("TestBody"), std::string::npos) << text;
    EXPECT_NE(text.find("cudaErrorInvalidValue: "), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace minillm::cuda
