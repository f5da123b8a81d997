// Virtual time, the device's own clock in `clock` mode (sim/control.h): for tests of what overlaps with what.
//
// Only operations that say so take time, all others none. An operation in virtual time begins when it is the
// first of its stream, and lasts for its latency and then for as long as it is busy; those that are busy on
// the same resource at the same time get equal parts of it. What follows it on its stream, and waits for
// that, comes after its end. Time stands still while the host does not wait. Events record virtual times.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/driver_types.h"

namespace sim {

struct VirtualWork {
  int64_t tag = 0;  ///< what VirtualEnd calls it
  int resource = 0;
  double latency_s = 0;
  double busy_s = 0;  ///< with all of the resource
};

/// An operation in virtual time that ended.
struct VirtualEnd {
  int64_t tag = 0;
  double at_s = 0;
};

/// Enqueues an operation that does nothing but take time; in a capture it is recorded, and takes it at each
/// launch. Of the two times at least one is positive. Throws std::logic_error in modes other than `clock`
/// and for a capture that does not admit it.
void enqueue_work(cudaStream_t stream, const VirtualWork& work);
/// What ended since the last call or the last change of the mode, in order.
std::vector<VirtualEnd> take_virtual_ends();

/// The operations in progress. Not thread safe: guarded by Scheduler's mutex.
class VirtualClock {
 public:
  double now_s() const { return now_s_; }
  /// Nothing when the stream's operation is in progress already.
  void begin(CUstream_st& stream, const VirtualWork& work);
  /// Moves on to the next end, and returns its stream. Something has to be in progress.
  CUstream_st& advance();
  std::vector<VirtualEnd> take_ends();

 private:
  struct InProgress {
    CUstream_st* stream;
    VirtualWork left;
  };
  double slowdown(const InProgress& one) const;

  double now_s_ = 0;
  std::vector<InProgress> in_progress_;
  std::vector<VirtualEnd> ends_;
};

}  // namespace sim
