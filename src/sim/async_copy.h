// Asynchronous copies to shared memory (cp.async) of one CUDA thread.
//
// A copy may read its source and write its target at any time between its issue and the wait for its group.
// Data moves at one of the two ends: at the wait in the forward order of blocks and threads, at the issue in
// the reverse order, at either by chance in a shuffled one; so a kernel that relies on more than the wait
// gives other results. ThreadSanitizer sees each copy as work of another thread that the issue starts and the
// wait joins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sim/control.h"

namespace sim {

class AsyncCopies {
 public:
  AsyncCopies() = default;
  ~AsyncCopies();
  AsyncCopies(const AsyncCopies&) = delete;
  AsyncCopies& operator=(const AsyncCopies&) = delete;

  /// 4, 8 or 16 bytes, the last of them zero where `source_bytes` is smaller. A misaligned address is an
  /// error that names both.
  void issue(void* to, const void* from, size_t bytes, size_t source_bytes, const Order& order);
  /// Closes the group of the copies issued since the last commit. More than kGroups open groups are an error.
  void commit();
  /// Returns when at most `pending` of the latest groups are still under way.
  void wait(unsigned pending);
  /// What the hardware does when a thread ends with copies under way.
  void finish();

 private:
  static constexpr uint64_t kGroups = 8;
  struct Copy {
    void* to;
    const void* from;
    size_t bytes, source_bytes;
    uint64_t group;
  };
  static void move(const Copy& copy);
  void announce(const Copy& copy);
  void announce_end();
  void join(uint64_t end);

  std::vector<Copy> late_;  // to be moved at the wait, in order of issue
  uint64_t issued_ = 0;     // copies
  uint64_t group_ = 0;      // the open group
  uint64_t joined_ = 0;     // groups before this one have been waited for
  void* fiber_ = nullptr;   // ThreadSanitizer's thread that copies
  char issue_key_ = 0;
  char group_keys_[kGroups] = {};
};

}  // namespace sim
