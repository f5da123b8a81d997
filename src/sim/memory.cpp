#include "sim/memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sim/control.h"
#include "sim/counters.h"

namespace sim {

Memory::~Memory() {
  if (allocations_.empty()) return;
  for (const auto& [address, allocation] : allocations_)
    std::fprintf(stderr, "simulated device: leaked %s allocation number %lld of %zu bytes\n",
                 allocation.kind == Kind::kDevice ? "device" : "pinned host",
                 static_cast<long long>(allocation.sequence), allocation.bytes);
  std::fflush(nullptr);
  std::_Exit(kLeakExitCode);
}

void* Memory::allocate(Kind kind, size_t bytes) {
  std::lock_guard lock(mutex_);
  const bool on_device = kind == Kind::kDevice;
  const auto available = static_cast<size_t>(settings().memory_bytes - device_bytes_);
  if (on_device && (device_bytes_ > settings().memory_bytes || bytes > available)) return nullptr;
  void* memory = nullptr;
  const size_t alignment = bytes < 4096 ? 256 : 4096;
  if (posix_memalign(&memory, alignment, bytes) != 0) return nullptr;
  std::memset(memory, 0xff, bytes);
  allocations_[reinterpret_cast<uintptr_t>(memory)] = {kind, bytes, ++sequence_};
  count_allocation();
  if (on_device) {
    device_bytes_ += static_cast<int64_t>(bytes);
    count_memory(static_cast<int64_t>(bytes));
  }
  return memory;
}

bool Memory::release(Kind kind, void* pointer) {
  std::lock_guard lock(mutex_);
  const auto found = allocations_.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == allocations_.end() || found->second.kind != kind) return false;
  if (kind == Kind::kDevice) {
    device_bytes_ -= static_cast<int64_t>(found->second.bytes);
    count_memory(-static_cast<int64_t>(found->second.bytes));
  }
  allocations_.erase(found);
  std::free(pointer);
  return true;
}

Memory::Range Memory::classify(const void* pointer, size_t bytes) {
  std::lock_guard lock(mutex_);
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto found = allocations_.upper_bound(address);
  if (found == allocations_.begin()) return {};
  --found;
  const size_t offset = address - found->first;
  if (offset >= found->second.bytes) return {};
  return {found->second.kind, bytes <= found->second.bytes - offset};
}

int64_t Memory::device_bytes() {
  std::lock_guard lock(mutex_);
  return device_bytes_;
}

}  // namespace sim
