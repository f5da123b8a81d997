// Stream capture: operations that are recorded instead of run, as the branches of a graph.
//
// The rules and errors are CUDA's. Where CUDA leaves open what happens, or lets pass what cannot be replayed,
// this is the stricter one: copies from or to pageable memory and waits for events never recorded are errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "sim/clock.h"
#include "sim/driver_types.h"

namespace sim {

class Team;

struct Operation {
  std::function<void(Team&)> run;  // with the workers of the stream that it is an entry of
  VirtualWork work = {};           // in `clock` mode, where it runs at the end of it
};

/// The work of a graph. Never changes once captured: executable graphs that run at the same time share it.
struct Recording {
  enum class Kind { kOperation, kRecord, kWait, kRecordEvent, kWaitForEvent };
  struct Entry {
    Kind kind;
    size_t branch;
    Operation operation{};
    size_t awaited = 0;           // kWait: which entry, a kRecord
    cudaEvent_t event = nullptr;  // kRecordEvent, kWaitForEvent: on the event itself, anew at each launch
  };
  size_t branches = 0;         // one per captured stream, each in stream order; the first is the origin's
  std::vector<Entry> entries;  // in the order of the calls, so that awaited entries precede the waits
  std::vector<std::function<void()>> at_launch;
};

/// How many operations of each branch precede a point in a capture.
using Clock = std::vector<int64_t>;

/// Where an event was recorded in a capture.
struct CapturedRecord {
  uint64_t capture;
  size_t entry;
  Clock clock;
};

/// A capture in progress. Not thread safe: guarded by Scheduler's mutex.
class Capture {
 public:
  Capture(uint64_t id, cudaStreamCaptureMode mode);

  const uint64_t id;
  const cudaStreamCaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();
  bool invalidated = false;
  std::vector<CUstream_st*> streams;  // by branch; null: destroyed

  /// Adds the next branch.
  void join(CUstream_st& stream);
  bool has_blocking_stream() const;

  void add(size_t branch, Operation operation);
  CapturedRecord record(size_t branch);
  void wait(size_t branch, const CapturedRecord& record);
  void record_event(size_t branch, cudaEvent_t event);
  void wait_for_event(size_t branch, cudaEvent_t event);
  void at_launch(std::function<void()> function);

  /// Whether the origin waits for all operations.
  bool joined() const;
  Recording take();

 private:
  void count(size_t branch);

  Recording recording_;
  std::vector<Clock> clocks_;  // by branch
};

/// The calling thread's mode, which says which captures forbid it unsafe calls.
cudaStreamCaptureMode& thread_capture_mode();

}  // namespace sim
