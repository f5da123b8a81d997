// Streams and events: in-order queues of operations, and points in them that others wait for.
//
// ThreadSanitizer's view. Every operation runs in a TSan fiber of its stream, never in the context of the OS
// thread that serves the queue: that thread takes the queue's mutex, as the host does, and would carry
// orderings between streams that CUDA does not give. A stream's fiber learns of others only through explicit
// pairs:
//   enqueue → the operation,   mark reached → wait on it,   mark reached → the host that waited for it.
//
// An executable graph owns a stream per branch of its recording. A launch puts the recorded entries on them,
// with marks of its own, between a mark of the launch's stream that the origin's branch waits for and a mark
// of that branch that the launch's stream waits for: what holds for streams holds inside a graph. A launch
// follows the one before because the origin's branch, where all others join, is a queue.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "sim/capture.h"
#include "sim/clock.h"
#include "sim/control.h"
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

}  // namespace sim

struct CUstream_st {
  CUstream_st(unsigned flags, int workers) : flags(flags), team(workers) {}

  struct Entry {  // each part may be missing; taken in this order
    std::shared_ptr<sim::Mark> wait;
    const sim::Operation* operation = nullptr;
    std::shared_ptr<sim::Mark> mark;
    bool of_graph = false;  // which keeps the operation for its next launch
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
  sim::Capture* capture = nullptr;          // that records what is enqueued
  size_t branch = 0;                        // of the capture

  std::thread thread;  // in `threads` mode
};

struct CUevent_st {
  unsigned flags = 0;
  // Of the most recent record, at most one of them; guarded by Scheduler's mutex.
  std::shared_ptr<sim::Mark> mark;
  std::optional<sim::CapturedRecord> captured;
};

struct CUgraph_st {
  std::shared_ptr<const sim::Recording> recording;
};

struct CUgraphExec_st {
  std::shared_ptr<const sim::Recording> recording;
  std::vector<CUstream_st*> streams;  // by branch
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

  /// What `operation` throws becomes the device's failure; after a failure operations are skipped. In a
  /// capture the operation is recorded. Errors are those of a capture.
  cudaError_t enqueue(cudaStream_t stream, std::function<void()> operation);
  cudaError_t enqueue_kernel(cudaStream_t stream, Kernel kernel);
  /// In `clock` mode only; throws std::logic_error in others.
  cudaError_t enqueue_work(cudaStream_t stream, const VirtualWork& work);
  std::vector<VirtualEnd> take_virtual_ends();
  /// For counters: calls `function` now, or, of a stream that captures, when the graph is launched.
  void at_launch(cudaStream_t stream, std::function<void()> function);

  void synchronize(cudaStream_t stream);
  void synchronize_all();
  bool query(cudaStream_t stream);

  cudaEvent_t create_event(unsigned flags);
  void destroy_event(cudaEvent_t event);
  bool exists(cudaEvent_t event);
  /// `external`, in a capture only: each launch of the graph records the event, or waits for the record that
  /// is its most recent when the graph is launched.
  cudaError_t record(cudaEvent_t event, cudaStream_t stream, bool external = false);
  /// Of an event that was never recorded: nothing to wait for, done.
  cudaError_t wait_on_stream(cudaStream_t stream, cudaEvent_t event, bool external = false);
  void synchronize(cudaEvent_t event);
  bool query(cudaEvent_t event);
  /// When the most recent record was reached; the epoch when there is none.
  std::chrono::steady_clock::time_point reached(cudaEvent_t event);

  cudaError_t begin_capture(cudaStream_t stream, cudaStreamCaptureMode mode);
  /// `*graph` is set on success only.
  cudaError_t end_capture(cudaStream_t stream, cudaGraph_t* graph);
  cudaError_t capture_status(cudaStream_t stream, cudaStreamCaptureStatus& status, uint64_t& id);
  /// The error of a call that would wait for the device, a stream or an event, or ask how far it is, while
  /// captures are in progress. It invalidates the captures that forbid the call.
  cudaError_t check_host_wait();
  cudaError_t check_host_wait(cudaStream_t stream);
  cudaError_t check_host_wait(cudaEvent_t event);
  /// The same of a call that is unsafe in the sense of cudaThreadExchangeStreamCaptureMode.
  cudaError_t check_unsafe_call();

  bool exists(cudaGraph_t graph);
  void destroy_graph(cudaGraph_t graph);
  cudaGraphExec_t instantiate(cudaGraph_t graph);
  bool exists(cudaGraphExec_t graph);
  /// Waits for the launches; the host is not ordered after them.
  void destroy_graph(cudaGraphExec_t graph);
  cudaError_t launch(cudaGraphExec_t graph, cudaStream_t stream);

  /// Takes the scheduling mode from settings() again. Throws std::logic_error while a stream exists.
  void reload_mode();

 private:
  using Lock = std::unique_lock<std::mutex>;
  cudaError_t add(cudaStream_t stream, Operation operation);

  // Captures; all under the mutex.
  static cudaError_t invalidate(Capture& capture, cudaError_t error);
  Capture* find_capture(uint64_t id);
  cudaError_t admit(const CUstream_st& stream);
  cudaError_t admit_unsafe_call();
  void drop(Capture& capture);
  void leave_capture(CUstream_st& stream);
  void record_captured(CUstream_st& stream, cudaEvent_t event, bool external);
  cudaError_t wait_captured(CUstream_st& stream, cudaEvent_t event, bool external);
  cudaGraph_t add_graph(Recording recording);
  void replay(const CUgraphExec_st& graph, CUstream_st& stream);
  using Marks = std::vector<std::shared_ptr<Mark>>;  // of a launch, by entry
  void replay_entry(const CUgraphExec_st& graph, size_t position, Marks& marks);

  CUstream_st& resolve(cudaStream_t stream);
  CUstream_st& add_stream(unsigned flags);
  void push(CUstream_st& stream, CUstream_st::Entry entry);
  void push_ordered(CUstream_st& stream, CUstream_st::Entry entry);
  std::shared_ptr<Mark> push_mark(CUstream_st& stream);
  void serve(CUstream_st& stream);
  void run_front(Lock& lock, CUstream_st& stream);
  bool run_any(Lock& lock);
  CUstream_st& draw(const std::vector<CUstream_st*>& ready);
  CUstream_st& choose_by_clock(const std::vector<CUstream_st*>& ready);
  bool is_pumped() const { return mode_ != Streams::Kind::kThreads; }
  std::chrono::steady_clock::time_point now() const;
  void wait_until_done(const Mark& mark);
  bool is_done(const std::shared_ptr<Mark>& mark);
  void stop(std::unique_ptr<CUstream_st> stream);

  std::mutex mutex_;
  std::condition_variable marked_;
  std::vector<std::unique_ptr<CUstream_st>> streams_;  // in order of creation
  std::unordered_set<cudaEvent_t> events_;
  std::vector<std::unique_ptr<Capture>> captures_;
  uint64_t captures_begun_ = 0;
  std::vector<std::unique_ptr<CUgraph_st>> graphs_;
  std::vector<std::unique_ptr<CUgraphExec_st>> executable_graphs_;
  CUstream_st* default_ = nullptr;  // created at first use
  std::shared_ptr<Mark> default_mark_;

  Streams::Kind mode_ = Streams::Kind::kThreads;
  // In other modes operations run on the host's thread, one thread at a time.
  std::mutex pump_mutex_;
  std::mt19937_64 choice_;
  VirtualClock clock_;
  std::thread::id owner_;  // whoever used the device first; queries by others do not advance the schedule
};

}  // namespace sim
