// Settings of the simulated device. Each is read once from its environment variable and can be set by the
// program. A variable that cannot be understood is a minillm::UsageError from the first call that needs the
// device.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace sim {

struct Order {
  enum class Kind { kForward, kStepwise, kReverse, kShuffle };
  Kind kind = Kind::kForward;
  uint64_t seed = 0;
};

struct Streams {
  enum class Kind { kThreads, kSeed, kClock };
  Kind kind = Kind::kThreads;
  uint64_t seed = 0;
};

/// What NCCL does for memory: everything; registers it locally only, as the device has no virtual memory
/// management; refuses windows; refuses to allocate.
enum class NcclMemory { kWindows, kLocal, kNoWindows, kNone };

struct Settings {
  /// MINILLM_SIM_WORKERS: threads that a stream spreads a kernel's blocks over; default: cores / ranks on
  /// this machine.
  int workers = 1;
  /// MINILLM_SIM_ORDER, forward | stepwise | reverse | shuffle:SEED: in which order blocks, and threads
  /// within a block, take turns. In all but the first each instruction of a warp is a meeting of its own;
  /// `stepwise` is the first without that shortcut. A captured kernel keeps the order that was set when it
  /// was captured.
  Order order;
  /// MINILLM_SIM_STREAMS, threads | seed:N | clock. `threads`: each stream runs on a thread of its own. A
  /// seed: operations run only while the host waits or queries, on its thread, and which stream comes next is
  /// drawn, a pure function of the seed and the program. `clock`: likewise, but in the order of virtual time
  /// (sim/clock.h).
  Streams streams;
  /// MINILLM_SIM_MEMORY: device memory in bytes; suffixes K, M, G are powers of 1024.
  int64_t memory_bytes = 80'000'000'000;
  /// MINILLM_SIM_DELAY: seed of random short sleeps before operations in `threads` mode.
  std::optional<uint64_t> delay_seed;
  /// MINILLM_SIM_NCCL_MEMORY, windows | local | no-windows | none: as on machines that cannot do more.
  NcclMemory nccl_memory = NcclMemory::kWindows;
  /// MINILLM_SIM_NCCL_VERSION, X.Y.Z: what ncclGetVersion tells, X * 10000 + Y * 100 + Z. The default has
  /// none of the faults that comm/path.h knows.
  int nccl_version = 23102;
  /// MINILLM_SIM_COMPUTE_CAPABILITY, MAJOR.MINOR: ten times the first plus the second.
  int compute_capability = 90;
  /// MINILLM_SIM_NCCL_BUFFERS: device memory in bytes, with suffixes as above, that each communicator of
  /// several ranks takes for itself.
  int64_t nccl_buffer_bytes = 0;
};

/// What is in force.
Settings settings();

/// Each throws minillm::UsageError for a value that its variable would not allow. A new number of workers
/// counts for streams created later. set_streams waits for all work and throws std::logic_error while a
/// stream exists.
void set_workers(int workers);
void set_order(std::string_view order);
void set_order(Order order);
void set_streams(std::string_view mode);
void set_memory(int64_t bytes);
void set_delay(std::optional<uint64_t> seed);
void set_nccl_memory(std::string_view support);
void set_nccl_version(std::string_view version);
void set_nccl_buffers(int64_t bytes);

/// Forgets a kernel's or host function's failure, which CUDA cannot: for tests that plant one.
void clear_failure();

/// Exit code of a process that ends with device or pinned memory not freed.
inline constexpr int kLeakExitCode = 70;

}  // namespace sim
