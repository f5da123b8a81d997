// Device and pinned host memory with an owner, counted: the figures behind "Peak VRAM".
#pragma once

#include <cstddef>
#include <cstdint>

namespace minillm::cuda {

/// Owns device memory. Movable, not copyable. Freed in the destructor (cudaFree waits for the device).
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// 256-byte aligned, contents undefined. Throws MemoryError when the device has not enough.
  explicit DeviceMemory(int64_t bytes);
  /// Takes over `bytes` bytes at `data` that another allocator gave, and calls free(data) at the end. Counted
  /// like its own.
  DeviceMemory(std::byte* data, int64_t bytes, void (*free)(void* data));
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  void (*free_)(void*) = nullptr;
};

/// Owns page-locked host memory, as DeviceMemory owns device memory. Contents are zero.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(int64_t bytes);
  ~PinnedMemory();
  PinnedMemory(PinnedMemory&& other) noexcept;
  PinnedMemory& operator=(PinnedMemory&& other) noexcept;
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// Bytes that all DeviceMemory objects of this process hold now, and held at most.
int64_t device_bytes_in_use();
int64_t device_bytes_peak();

/// Memory of the current device in bytes.
struct DeviceCapacity {
  int64_t free = 0;
  int64_t total = 0;
};
DeviceCapacity device_capacity();

}  // namespace minillm::cuda
