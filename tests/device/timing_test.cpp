// Times of runs, and the memory that they are to find in no cache.
#include "cuda/timing.h"

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

namespace minillm::cuda {
namespace {

TEST(Timing, SetsAreTwiceTheCacheWithoutTheOneInUse) {
  const int64_t cache = l2_cache_bytes(), much = int64_t{1} << 50;
  ASSERT_GT(cache, 0);
  EXPECT_EQ(cold_sets(1000, 20, much), 20) << "a set for each run is enough";
  EXPECT_EQ(cold_sets(cache, 20, much), 3);
  EXPECT_EQ(cold_sets(10 * cache, 20, much), 2);
  EXPECT_EQ(cold_sets(cache, 20, 2 * cache), 2);
  EXPECT_EQ(cold_sets(cache, 20, 0), 1);
  EXPECT_EQ(cold_sets(0, 20, 0), 1);
}

/// Work on the device for so many milliseconds, or a little more.
void enqueue_sleep(int64_t& milliseconds, cudaStream_t stream) {
  check(cudaLaunchHostFunc(
      stream,
      [](void* argument) {
        std::this_thread::sleep_for(std::chrono::milliseconds(*static_cast<int64_t*>(argument)));
      },
      &milliseconds));
}

TEST(Timing, OfEachRunAndNotOfWhatIsBetween) {
  const Stream stream;
  std::vector<int64_t> sleeps = {1, 40, 8};
  int64_t between = 80;
  const std::vector<double> seconds = time_runs(
      3, [&](int i) { enqueue_sleep(sleeps[static_cast<size_t>(i)], stream.get()); }, stream.get(),
      [&](int) { enqueue_sleep(between, stream.get()); });
  ASSERT_EQ(seconds.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_GE(seconds[i], 0.9e-3 * static_cast<double>(sleeps[i]));
    EXPECT_LT(seconds[i], 1e-3 * static_cast<double>(sleeps[i] + between)) << "counted what is between";
  }
}

TEST(Timing, Median) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 3, 2}), 3);
  EXPECT_THROW(median({}), InternalError);
}

/// Mean and standard deviation.
template <class T, class ToFloat>
std::pair<double, double> moments(const std::vector<T>& values, const ToFloat& to_float) {
  double sum = 0, squares = 0;
  for (const T value : values) sum += to_float(value), squares += std::pow(to_float(value), 2);
  const auto count = static_cast<double>(values.size());
  return {sum / count, std::sqrt(squares / count)};
}

TEST(Timing, NumbersAreNormalInEitherType) {
  constexpr int64_t kBytes = (3 << 20) + 4;  // more than is uploaded at once
  const DeviceMemory memory(kBytes);
  const Stream stream;
  fill_with_numbers({memory.data(), kBytes}, stream.get());
  stream.synchronize();
  std::vector<uint32_t> words(kBytes / 4);
  std::vector<uint16_t> halves(kBytes / 2);
  check(cudaMemcpy(words.data(), memory.data(), kBytes, cudaMemcpyDeviceToHost));
  check(cudaMemcpy(halves.data(), memory.data(), kBytes, cudaMemcpyDeviceToHost));
  const auto fp32 = moments(words, [](uint32_t bits) { return std::bit_cast<float>(bits); });
  const auto bf16 = moments(halves, [](uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); });
  for (const auto& [mean, deviation] : {fp32, bf16}) {
    EXPECT_NEAR(mean, 0, 0.01);
    EXPECT_NEAR(deviation, 1, 0.01);
  }
}

}  // namespace
}  // namespace minillm::cuda
