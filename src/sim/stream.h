// Streams and events: in-order queues of operations, and points in them that others wait for.
//
// ThreadSanitizer's view. Every operation runs in a TSan fiber of its stream, never in the context of the OS
// thread that serves the queue: that thread takes the queue's mutex, as the host does, and would carry
// orderings between streams that CUDA does not give. A stream's fiber learns of others only through explicit
// pairs:
//   enqueue → the operation,   mark reached → wait on it,   mark reached → the host that waited for it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "sim/driver_types.h"
#include "sim/operation_fiber.h"
#include "sim/team.h"

namespace sim {

/// A point in a stream: done when everything enqueued before it is.
struct Mark {
  bool done = false;  // this and `when`: guarded by Scheduler's mutex
  std::chrono::steady_clock::time_point when;
  char key = 0;
};

using Operation = std::function<void()>;

}  // namespace sim

struct CUstream_st {
  CUstream_st(unsigned flags, int workers) : flags(flags), team(workers) {}

  struct Entry {  // each part may be missing; taken in this order
    std::shared_ptr<sim::Mark> wait;
    sim::Operation* operation = nullptr;
    std::shared_ptr<sim::Mark> mark;
  };

  const unsigned flags;
  sim::Team team;
  sim::OperationFiber fiber;
  char served_key = 0;  // TSan: the serving thread's start, where its thread-local memory begins → operations
  char done_key = 0;    // an operation → the host that finds the stream idle

  // Guarded by Scheduler's mutex.
  std::deque<Entry> queue;
  bool running = false;
  bool stopping = false;
  std::condition_variable filled;
  std::shared_ptr<sim::Mark> seen_default;  // the default stream's mark that this stream waited for last

  std::thread thread;  // in `threads` mode
};

struct CUevent_st {
  unsigned flags = 0;
  std::shared_ptr<sim::Mark> mark;  // of the most recent record; guarded by Scheduler's mutex
};

namespace sim {

/// The streams and events of the device, and the rule by which operations run. Thread safe. A null stream is
/// the default stream, with CUDA's legacy semantics: it waits for, and holds up, all streams but non-blocking
/// ones.
class Scheduler {
 public:
  Scheduler();
  /// Drops what has not begun, waits for what has.
  ~Scheduler();

  cudaStream_t create_stream(unsigned flags);
  /// Waits for the stream's work; the host is not ordered after it.
  void destroy_stream(cudaStream_t stream);
  bool exists(cudaStream_t stream);

  /// What `operation` throws becomes the device's failure; after a failure operations are skipped.
  void enqueue(cudaStream_t stream, Operation operation);
  void enqueue_kernel(cudaStream_t stream, Kernel kernel);

  void synchronize(cudaStream_t stream);
  void synchronize_all();
  bool query(cudaStream_t stream);

  cudaEvent_t create_event(unsigned flags);
  void destroy_event(cudaEvent_t event);
  bool exists(cudaEvent_t event);
  void record(cudaEvent_t event, cudaStream_t stream);
  /// Of an event that was never recorded: nothing to wait for, done.
  void wait_on_stream(cudaStream_t stream, cudaEvent_t event);
  void synchronize(cudaEvent_t event);
  bool query(cudaEvent_t event);
  /// When the most recent record was reached; the epoch when there is none.
  std::chrono::steady_clock::time_point reached(cudaEvent_t event);

  /// Takes the scheduling mode from settings() again. Throws std::logic_error while a stream exists.
  void reload_mode();

 private:
  using Lock = std::unique_lock<std::mutex>;
  CUstream_st& resolve(cudaStream_t stream);
  CUstream_st& add_stream(unsigned flags);
  void push(CUstream_st& stream, CUstream_st::Entry entry);
  void push_ordered(CUstream_st& stream, CUstream_st::Entry entry);
  std::shared_ptr<Mark> push_mark(CUstream_st& stream);
  void serve(CUstream_st& stream);
  void run_front(Lock& lock, CUstream_st& stream);
  bool run_any(Lock& lock);
  void wait_until_done(const Mark& mark);
  bool is_done(const std::shared_ptr<Mark>& mark);
  void stop(std::unique_ptr<CUstream_st> stream);

  std::mutex mutex_;
  std::condition_variable marked_;
  std::vector<std::unique_ptr<CUstream_st>> streams_;  // in order of creation
  std::unordered_set<cudaEvent_t> events_;
  CUstream_st* default_ = nullptr;  // created at first use
  std::shared_ptr<Mark> default_mark_;

  // Seeded mode: operations run on the host's thread, one thread at a time.
  bool seeded_ = false;
  std::mutex pump_mutex_;
  std::mt19937_64 choice_;
  std::thread::id owner_;  // whoever used the device first; queries by others do not advance the schedule
};

}  // namespace sim
