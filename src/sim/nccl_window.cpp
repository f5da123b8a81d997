#include "sim/nccl_window.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "sim/nccl_issue_order.h"
#include "sim/nccl_transport.h"
#if !defined(CUDART_VERSION)  // the simulated device
#include "sim/control.h"
#endif

namespace nccl_over_mpi {
namespace {

#if defined(CUDART_VERSION)
// cudaMalloc begins allocations of this size at page boundaries, smaller ones need not be.
constexpr int64_t kSmallestAllocation = 2 << 20;
bool can_allocate() {
  return true;
}
bool can_register() {
  return true;
}
#else
constexpr int64_t kSmallestAllocation = NCCL_WIN_REQUIRED_ALIGNMENT;
bool can_allocate() {
  return sim::settings().nccl_memory != sim::NcclMemory::kNone;
}
bool can_register() {
  const sim::NcclMemory memory = sim::settings().nccl_memory;
  return memory == sim::NcclMemory::kWindows || memory == sim::NcclMemory::kLocal;
}
#endif

struct Allocation {
  int64_t bytes;
  std::vector<std::string> communicators;  ///< that have windows in it, once per window
};
using Allocations = std::map<const std::byte*, Allocation>;

/// All memory that ncclMemAlloc gave. Used on host threads only, so that the lock orders no streams.
struct Registry {
  std::mutex mutex;
  Allocations allocations;
};
Registry& registry() {
  static auto* const registry = new Registry;  // outlives all threads
  return *registry;
}

template <class Body>
auto with_allocations(Body body) {
  const std::lock_guard lock(registry().mutex);
  return body(registry().allocations);
}

/// The allocation that [begin, begin + bytes) lies in, or end().
Allocations::iterator find_allocation(Allocations& allocations, const std::byte* begin, int64_t bytes) {
  auto found = allocations.upper_bound(begin);
  if (found == allocations.begin()) return allocations.end();
  --found;
  return begin - found->first <= found->second.bytes - bytes ? found : allocations.end();
}

void require_free(const Allocations::value_type& entry) {
  const std::vector<std::string>& communicators = entry.second.communicators;
  if (!communicators.empty())
    throw Failure(ncclInvalidUsage, "ncclMemFree: " + std::to_string(entry.second.bytes) +
                                        " bytes are still registered with communicator " +
                                        communicators.front() +
                                        ": ncclCommWindowDeregister has to come first");
}

void forget_registration(const ncclWindow_vidmem& window, const std::string& communicator) {
  with_allocations([&](Allocations& allocations) {
    std::vector<std::string>& names =
        find_allocation(allocations, window.begin, window.bytes)->second.communicators;
    names.erase(std::ranges::find(names, communicator));
  });
}

}  // namespace

void* allocate_memory(int64_t bytes) {
  if (!can_allocate()) throw Failure(ncclSystemError, "ncclMemAlloc: MINILLM_SIM_NCCL_MEMORY is none");
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max(bytes, kSmallestAllocation)), "ncclMemAlloc: cudaMalloc");
  if (reinterpret_cast<uintptr_t>(memory) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
    (void)cudaFree(memory);
    throw Failure(ncclInternalError, "ncclMemAlloc: cudaMalloc gave memory that begins within a page");
  }
  with_allocations([&](Allocations& allocations) {
    allocations[static_cast<std::byte*>(memory)] = {bytes, {}};
  });
  return memory;
}

void free_memory(void* memory) {
  with_allocations([&](Allocations& allocations) {
    const auto found = allocations.find(static_cast<std::byte*>(memory));
    if (found == allocations.end())
      throw Failure(ncclInvalidArgument, "ncclMemFree: the pointer is not one that ncclMemAlloc gave");
    require_free(*found);
    allocations.erase(found);
  });
  check(cudaFree(memory), "ncclMemFree: cudaFree");
}

Windows::~Windows() {
  for (const auto& window : windows_) forget_registration(*window, communicator_);
}

std::string Windows::refusal(const void* buffer, int64_t bytes, int flags) const {
  const auto* begin = static_cast<const std::byte*>(buffer);
  const std::string range = std::to_string(bytes) + " bytes";
  if (!can_register()) return "MINILLM_SIM_NCCL_MEMORY is no-windows";
  if (flags != NCCL_WIN_DEFAULT && flags != NCCL_WIN_COLL_SYMMETRIC)
    return "unknown flags " + std::to_string(flags);
  if (begin == nullptr || bytes <= 0) return "no memory was given";
  const int64_t offset = with_allocations([&](Allocations& allocations) {
    const auto found = find_allocation(allocations, begin, bytes);
    return found == allocations.end() ? -1 : begin - found->first;
  });
  if (offset < 0) return range + " are not within memory of one ncclMemAlloc";
  if (offset % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
    return range + " begin at offset " + std::to_string(offset) + " of their allocation, which has to be a " +
           "multiple of " + std::to_string(NCCL_WIN_REQUIRED_ALIGNMENT);
  for (const auto& window : windows_)
    if (begin < window->begin + window->bytes && window->begin < begin + bytes)
      return range + " overlap window " + std::to_string(window->number) +
             ": memory is registered once per communicator";
  return "";
}

ncclWindow_t Windows::add(const void* buffer, int64_t bytes, int flags) {
  const auto* begin = static_cast<const std::byte*>(buffer);
  with_allocations([&](Allocations& allocations) {
    find_allocation(allocations, begin, bytes)->second.communicators.push_back(communicator_);
  });
  windows_.emplace_back(
      new ncclWindow_vidmem{begin, bytes, registered_++, (flags & NCCL_WIN_COLL_SYMMETRIC) != 0});
  return windows_.back().get();
}

void Windows::remove(ncclWindow_t window) {
  const auto found = std::ranges::find(windows_, window, &std::unique_ptr<ncclWindow_vidmem>::get);
  if (found == windows_.end())
    throw Failure(ncclInvalidArgument, "communicator " + communicator_ + " has no such window");
  forget_registration(*window, communicator_);
  windows_.erase(found);
}

Placement Windows::find(const void* buffer, int64_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(buffer);
  if (bytes == 0) return {};
  for (const auto& window : windows_) {
    const int64_t offset = begin - window->begin;
    if (!window->symmetric || offset < 0 || offset >= window->bytes) continue;
    if (bytes > window->bytes - offset)
      throw Failure(ncclInvalidArgument, "a buffer of " + std::to_string(bytes) + " bytes at offset " +
                                             std::to_string(offset) + " leaves window " +
                                             std::to_string(window->number) + " of " +
                                             std::to_string(window->bytes) + " bytes");
    return {window->number, offset};
  }
  return {};
}

}  // namespace nccl_over_mpi
