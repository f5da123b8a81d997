#include "profile/meter.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/check.h"
#include "cuda/timing.h"

namespace minillm::profile {
namespace {

constexpr int64_t kBoundary = 256;

/// Device memory that stays free: allocations have granules, and libraries take some of their own.
constexpr int64_t kSpare = int64_t{256} << 20;

/// As much as pushes everything out of the cache, and is enough for the host to get ahead when it is written
/// kLeadWrites times.
constexpr int64_t kLeastFlush = int64_t{64} << 20;
constexpr int kLeadWrites = 16;

int64_t flush_bytes() {
  return std::max(kLeastFlush, 2 * cuda::l2_cache_bytes());
}

/// Of one set.
int64_t set_bytes(const Case& c) {
  int64_t bytes = 0;
  for (const Buffer& buffer : c.buffers) bytes += round_up(buffer.bytes, kBoundary);
  return bytes;
}

/// Sets of a case's buffers, filled, and memory beside them to write to: set | set | … | flush.
class Sets {
 public:
  Sets(const Case& c, int64_t runs, cudaStream_t stream)
      : case_(c), bytes_(set_bytes(c)), flush_(flush_bytes()), stream_(stream) {
    count_ = cuda::cold_sets(bytes_, runs, cuda::device_capacity().free - flush_ - kSpare);
    try {
      memory_ = cuda::DeviceMemory(count_ * bytes_ + flush_);
    } catch (const MemoryError& error) {
      throw MemoryError("bench: " + c.name + ": " + error.what() + "; --only leaves cases out");
    }
  }

  int64_t count() const { return count_; }
  std::span<std::byte> memory() const { return {memory_.data(), static_cast<size_t>(memory_.bytes())}; }

  std::vector<Address> addresses(int64_t set) const {
    std::vector<Address> addresses;
    std::byte* at = memory_.data() + set % count_ * bytes_;
    for (const Buffer& buffer : case_.buffers) {
      addresses.push_back({at});
      at += round_up(buffer.bytes, kBoundary);
    }
    return addresses;
  }

  void fill() {
    cuda::fill_with_numbers(memory().first(static_cast<size_t>(count_ * bytes_)), stream_);
    for (int64_t set = 0; set < count_; ++set) {
      const std::vector<Address> at = addresses(set);
      for (size_t i = 0; i < at.size(); ++i) fill(at[i].at, case_.buffers[i]);
    }
  }

  void write_elsewhere() {
    cuda::check(cudaMemsetAsync(memory_.data() + count_ * bytes_, 0, static_cast<size_t>(flush_), stream_));
  }

 private:
  void fill(std::byte* at, const Buffer& buffer) {
    constexpr int kPositiveByte = 0x3f;  // repeated, about 0.75 in bf16 and in fp32
    if (buffer.contents == Contents::kPositive) {
      cuda::check(cudaMemsetAsync(at, kPositiveByte, static_cast<size_t>(buffer.bytes), stream_));
    } else if (buffer.contents == Contents::kIds) {
      std::vector<int32_t> values(static_cast<size_t>(buffer.bytes) / sizeof(int32_t));
      std::uniform_int_distribution<int32_t> uniform(0, narrow<int32_t>(buffer.ids - 1));
      for (int32_t& value : values) value = uniform(random_);
      cuda::check(cudaMemcpyAsync(at, values.data(), static_cast<size_t>(buffer.bytes),
                                  cudaMemcpyHostToDevice, stream_));
      cuda::check(cudaStreamSynchronize(stream_));  // before the values are gone
    }
  }

  const Case& case_;
  int64_t bytes_, flush_, count_ = 1;
  cudaStream_t stream_;
  cuda::DeviceMemory memory_;
  std::mt19937 random_{1};
};

}  // namespace

Meter::Meter(const MeterOptions& options)
    : options_(options),
      workspace_(cuda::BlasLt::workspace_bytes()),
      blas_(workspace_.data(), options.sm_limit) {}

double Meter::seconds(const Case& c) {
  const cudaStream_t stream = stream_.get();
  Sets sets(c, options_.repeats, stream);
  const auto call = [&](const Case::Function& function, int64_t set) {
    const std::vector<Address> addresses = sets.addresses(set);
    function({addresses, blas_, stream});
  };
  const size_t known_shapes = blas_.shapes().size();
  sets.fill();
  if (c.prepare)
    for (int64_t set = 0; set < sets.count(); ++set) call(c.prepare, set);
  call(c.run, 0);  // loads the kernels
  stream_.synchronize();
  if (options_.fastest_products && blas_.shapes().size() > known_shapes) {
    blas_.tune(blas_.shapes().back(), sets.memory(), stream);
    sets.fill();  // anew: tuning wrote there. Products need no prepare.
    call(c.run, 0);
  }
  for (int i = 0; i < kLeadWrites; ++i) sets.write_elsewhere();
  // One set alone would still be in the cache.
  const cuda::Run between = [&](int) { sets.write_elsewhere(); };
  return cuda::median(cuda::time_runs(
      options_.repeats, [&](int run) { call(c.run, run); }, stream,
      sets.count() == 1 && options_.repeats > 1 ? between : cuda::Run{}));
}

}  // namespace minillm::profile
