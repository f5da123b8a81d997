#include "cuda/memory.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "core/checked.h"
#include "core/error.h"
#include "cuda/check.h"

namespace minillm::cuda {
namespace {

std::atomic<int64_t> bytes_in_use{0};
std::atomic<int64_t> bytes_peak{0};

void count_allocation(int64_t bytes) {
  const int64_t now = bytes_in_use.fetch_add(bytes) + bytes;
  int64_t peak = bytes_peak.load();
  while (peak < now && !bytes_peak.compare_exchange_weak(peak, now)) {
  }
}

void require_size(const char* kind, int64_t bytes) {
  if (bytes < 0)
    throw InternalError(std::string(kind) + " memory: the size is " + std::to_string(bytes) +
                        " bytes; it must not be negative");
}

}  // namespace

DeviceMemory::DeviceMemory(int64_t bytes) {
  require_size("device", bytes);
  if (bytes == 0) return;
  void* data = nullptr;
  const cudaError_t code = cudaMalloc(&data, narrow<size_t>(bytes));
  if (code == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    const DeviceCapacity capacity = device_capacity();
    throw MemoryError(
        "out of device memory: " + std::to_string(bytes) + " bytes were asked for, " +
        std::to_string(capacity.free) + " of " + std::to_string(capacity.total) +
        " bytes are free; use a smaller batch or model, more ranks, or free the device of other "
        "programs");
  }
  check(code);
  *this = DeviceMemory(static_cast<std::byte*>(data), bytes, [](void* memory) { (void)cudaFree(memory); });
}

DeviceMemory::DeviceMemory(std::byte* data, int64_t bytes, void (*free)(void* data))
    : data_(data), bytes_(bytes), free_(free) {
  count_allocation(bytes);
}

DeviceMemory::~DeviceMemory() {
  if (!data_) return;
  free_(data_);
  bytes_in_use -= bytes_;
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      free_(std::exchange(other.free_, nullptr)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  DeviceMemory moved(std::move(other));
  std::swap(data_, moved.data_);
  std::swap(bytes_, moved.bytes_);
  std::swap(free_, moved.free_);
  return *this;
}

PinnedMemory::PinnedMemory(int64_t bytes) {
  require_size("pinned host", bytes);
  if (bytes == 0) return;
  void* data = nullptr;
  const cudaError_t code = cudaMallocHost(&data, narrow<size_t>(bytes));
  if (code == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw MemoryError("out of page-locked host memory: " + std::to_string(bytes) +
                      " bytes were asked for; raise the limit (ulimit -l) or the job's host memory");
  }
  check(code);
  data_ = static_cast<std::byte*>(data);
  bytes_ = bytes;
  std::memset(data_, 0, narrow<size_t>(bytes));
}

PinnedMemory::~PinnedMemory() {
  if (data_) (void)cudaFreeHost(data_);
}

PinnedMemory::PinnedMemory(PinnedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

PinnedMemory& PinnedMemory::operator=(PinnedMemory&& other) noexcept {
  PinnedMemory moved(std::move(other));
  std::swap(data_, moved.data_);
  std::swap(bytes_, moved.bytes_);
  return *this;
}

int64_t device_bytes_in_use() {
  return bytes_in_use;
}

int64_t device_bytes_peak() {
  return bytes_peak;
}

DeviceCapacity device_capacity() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total));
  return {narrow<int64_t>(free), narrow<int64_t>(total)};
}

}  // namespace minillm::cuda
