// Asynchronous copies to shared memory (cp.async) of one CUDA thread.
//
// A copy may read its source and write its target at any time between its issue and the wait for its group.
// Data moves at one of the two ends: at the wait in the forward order of blocks and threads, at the issue in
// the reverse order, at either by chance in a shuffled one; so a kernel that relies on more than the wait
// gives other results. ThreadSanitizer sees the accesses at both ends: whoever touches the memory in between,
// because a wait or a barrier is missing, is not ordered with one of them. (A thread of its own per copying
// thread would say the same, but ThreadSanitizer's time grows with the number of threads.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/control.h"

namespace sim {

class AsyncCopies {
 public:
  /// 4, 8 or 16 bytes, zeros instead of the source unless `exists`. A misaligned address is an error that
  /// names both.
  void issue(void* to, const void* from, size_t bytes, bool exists, const Order& order);
  /// Closes the group of the copies issued since the last commit. More than kGroups groups under way are an
  /// error.
  void commit();
  /// Returns when at most `pending` of the latest groups are under way.
  void wait(unsigned pending);
  /// What the hardware does when a thread ends with copies under way.
  void finish();

 private:
  static constexpr uint64_t kGroups = 8;
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    bool exists;
    bool moved;
    uint64_t group;
  };
  static void announce(const Copy& copy);
  static void move(const Copy& copy);
  void join(uint64_t end);

  std::vector<Copy> under_way_;  // in order of issue
  uint64_t issued_ = 0;          // copies
  uint64_t group_ = 0;           // the open group
  uint64_t joined_ = 0;          // groups before this one have been waited for
};

}  // namespace sim
