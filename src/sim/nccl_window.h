// Memory of ncclMemAlloc, and its registration with communicators.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim/nccl_call.h"

/// [begin, begin + bytes), registered with one communicator.
struct ncclWindow_vidmem {
  const std::byte* begin;
  int64_t bytes;
  int64_t number;  ///< among the windows that its communicator ever had: the same on all ranks
  bool symmetric;
};

namespace nccl_over_mpi {

/// Both throw Failure.
void* allocate_memory(int64_t bytes);
void free_memory(void* memory);

/// The windows of one communicator, for its host thread.
class Windows {
 public:
  explicit Windows(std::string communicator) : communicator_(std::move(communicator)) {}
  /// Forgets the registrations that are left.
  ~Windows();
  Windows(const Windows&) = delete;
  Windows& operator=(const Windows&) = delete;

  size_t size() const { return windows_.size(); }
  /// Why the range cannot become a window, or an empty string.
  std::string refusal(const void* buffer, int64_t bytes, int flags) const;
  ncclWindow_t add(const void* buffer, int64_t bytes, int flags);
  /// Throws Failure when there is no such window.
  void remove(ncclWindow_t window);
  /// Throws Failure for a buffer that begins in a window and leaves it.
  Placement find(const void* buffer, int64_t bytes) const;

 private:
  const std::string communicator_;
  int64_t registered_ = 0;  ///< so far
  std::vector<std::unique_ptr<ncclWindow_vidmem>> windows_;
};

}  // namespace nccl_over_mpi
