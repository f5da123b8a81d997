// The one allocation of device memory of a run, in the form that NCCL's fastest paths ask for.
//
// NCCL moves data by copy engines, and adds bf16 in fp32, only between buffers in symmetric windows: memory
// that it allocated, of one size on all ranks, registered with each communicator. Rejected: buffers
// registered one by one, since all live in one plan with the same offsets on all ranks anyway.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/watchdog.h"
#include "cuda/memory.h"

namespace minillm::comm {

/// Counted like cuda::DeviceMemory, to the byte asked for.
class Arena {
 public:
  Arena() = default;
  /// Collective over all ranks of `bootstrap`; `bytes` is the same on all. The communicators outlive the
  /// arena and are given in one order on all ranks; null ones are ignored. Without any of several ranks, or
  /// where NCCL refuses or a window would do harm (path.h), the memory is cudaMalloc's or no window of the
  /// communicator: Communicator::describe() says why. Throws CommunicationError when `bytes` differ,
  /// MemoryError when the device has not enough.
  ///
  /// A rank that is refused a window cannot tell whether the others are, too, or wait for it inside NCCL:
  /// then `watchdog` ends the job soon, with what was refused.
  ///
  /// Buffers in the arena that a collective is given have to have the same offset on all ranks (in place: the
  /// whole buffer).
  Arena(Bootstrap& bootstrap, int64_t bytes, std::vector<Communicator*> communicators,
        Watchdog* watchdog = nullptr);
  /// Waits for the device. No rank may destroy it while another uses it in a collective.
  ~Arena();
  Arena(Arena&&) noexcept = default;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// 256-byte aligned, contents undefined.
  std::byte* data() const { return memory_.data(); }
  int64_t bytes() const { return memory_.bytes(); }

 private:
  struct Window {
    Communicator* communicator;
    ncclWindow_t handle;
  };

  void register_with(Bootstrap& bootstrap, Communicator& communicator, Watchdog* watchdog);
  void release();

  cuda::DeviceMemory memory_;
  std::vector<Window> windows_;
};

}  // namespace minillm::comm
