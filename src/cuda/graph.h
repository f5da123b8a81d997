// CUDA graphs with an owner: work that is enqueued once and launched many times.
//
// Goals: a training step as one launch. Non-goals: graphs built or changed node by node; a launch does what
// was captured, with the pointers and arguments of the capture.
#pragma once

#include <cuda_runtime.h>

#include <functional>

namespace minillm::cuda {

/// Owns an executable graph. Movable, not copyable. The memory, events and communicators that the captured
/// work names outlive the last launch. The destructor may wait for launches in progress.
class Graph {
 public:
  /// Calls `work` once and records what it enqueues on `stream`, and on streams that wait there for an event
  /// recorded in the capture and that `stream` waits for in the end; none of it runs. `stream` is not the
  /// default stream. `work` neither waits for the device nor allocates or frees its memory nor copies
  /// pageable memory, and every kernel and matrix product in it has run once before (code is loaded and
  /// algorithms are chosen then).
  ///
  /// Throws what `work` throws, and DeviceError when something in it cannot be captured; the streams then
  /// take work as before.
  static Graph capture(cudaStream_t stream, const std::function<void()>& work);

  ~Graph();
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Runs the work once more, with the priorities of the streams that were captured: after what is on
  /// `stream`, which need not be the captured one, and after the launch before, and before what `stream` gets
  /// later. Does not block. Throws DeviceError.
  void launch(cudaStream_t stream) const;

 private:
  explicit Graph(cudaGraph_t recorded);

  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace minillm::cuda
