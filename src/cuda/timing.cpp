#include "cuda/timing.h"

#include <algorithm>
#include <bit>
#include <random>

#include "core/checked.h"
#include "cuda/check.h"
#include "cuda/stream.h"

namespace minillm::cuda {
namespace {

/// bf16 numbers of which any two in a row make an fp32 number of the size of the second.
const std::vector<uint16_t>& pattern() {
  static const std::vector<uint16_t> values = [] {
    std::vector<uint16_t> random(1 << 19);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    for (uint16_t& value : random)
      value = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(generator)) >> 16);
    return random;
  }();
  return values;
}

}  // namespace

int64_t l2_cache_bytes() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device));
  return bytes;
}

int64_t cold_sets(int64_t set_bytes, int64_t runs, int64_t room) {
  const int64_t bytes = std::max<int64_t>(set_bytes, 1);
  const int64_t cold = ceil_div(2 * l2_cache_bytes(), bytes) + 1;
  return std::max<int64_t>(std::min({runs, cold, room / bytes}), 1);
}

void fill_with_numbers(std::span<std::byte> memory, cudaStream_t stream) {
  const int64_t bytes = std::ssize(memory);
  int64_t filled = std::min<int64_t>(bytes, std::ssize(pattern()) * 2);
  check(cudaMemcpyAsync(memory.data(), pattern().data(), static_cast<size_t>(filled), cudaMemcpyHostToDevice,
                        stream));
  while (filled < bytes) {
    const int64_t more = std::min(filled, bytes - filled);
    check(cudaMemcpyAsync(memory.data() + filled, memory.data(), static_cast<size_t>(more),
                          cudaMemcpyDeviceToDevice, stream));
    filled += more;
  }
}

std::vector<double> time_runs(int runs, const Run& run, cudaStream_t stream, const Run& before) {
  struct Interval {
    Event begin{EventTiming::kEnabled}, end{EventTiming::kEnabled};
  };
  std::vector<Interval> intervals(static_cast<size_t>(runs));
  for (int i = 0; i < runs; ++i) {
    if (before) before(i);
    const Interval& interval = intervals[static_cast<size_t>(i)];
    interval.begin.record(stream);
    run(i);
    interval.end.record(stream);
  }
  check(cudaStreamSynchronize(stream));
  std::vector<double> seconds;
  for (const Interval& interval : intervals) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, interval.begin.get(), interval.end.get()));
    seconds.push_back(std::max(static_cast<double>(milliseconds), 1e-6) * 1e-3);
  }
  return seconds;
}

double median(std::vector<double> values) {
  if (values.empty()) throw InternalError("median: there are no values");
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace minillm::cuda
