// Graphs: the scheduler's part, and the runtime API of captures and graphs.
#include <algorithm>
#include <utility>

#include "cuda_runtime.h"
#include "sim/counters.h"
#include "sim/device.h"
#include "sim/failure.h"
#include "sim/sanitizer.h"

namespace sim {
namespace {

template <class Graph>
auto find(const std::vector<std::unique_ptr<Graph>>& graphs, const Graph* graph) {
  return std::find_if(graphs.begin(), graphs.end(), [=](const auto& owned) { return owned.get() == graph; });
}

template <class Graph>
void destroy(std::vector<std::unique_ptr<Graph>>& graphs, const Graph* graph) {
  const InvisibleScope invisible;  // the host is not ordered after the launches that read the recording
  graphs.erase(find(graphs, graph));
}

}  // namespace

cudaGraph_t Scheduler::add_graph(Recording recording) {
  auto shared = std::make_shared<const Recording>(std::move(recording));
  return graphs_.emplace_back(new CUgraph_st{std::move(shared)}).get();
}

bool Scheduler::exists(cudaGraph_t graph) {
  Lock lock(mutex_);
  return find(graphs_, graph) != graphs_.end();
}

void Scheduler::destroy_graph(cudaGraph_t graph) {
  Lock lock(mutex_);
  destroy(graphs_, graph);
}

cudaGraphExec_t Scheduler::instantiate(cudaGraph_t graph) {
  count_object();
  Lock lock(mutex_);
  auto& executable = *executable_graphs_.emplace_back(new CUgraphExec_st{graph->recording, {}});
  for (size_t branch = 0; branch < executable.recording->branches; ++branch)
    executable.streams.push_back(&add_stream(cudaStreamNonBlocking));
  return &executable;
}

bool Scheduler::exists(cudaGraphExec_t graph) {
  Lock lock(mutex_);
  return find(executable_graphs_, graph) != executable_graphs_.end();
}

void Scheduler::destroy_graph(cudaGraphExec_t graph) {
  for (CUstream_st* stream : graph->streams) destroy_stream(stream);
  Lock lock(mutex_);
  destroy(executable_graphs_, graph);
}

cudaError_t Scheduler::launch(cudaGraphExec_t graph, cudaStream_t stream) {
  {
    Lock lock(mutex_);
    CUstream_st& target = resolve(stream);
    if (const cudaError_t error = admit(target)) return error;
    if (target.capture != nullptr) return cudaErrorNotSupported;
    for (const Recording::Entry& entry : graph->recording->entries)
      if (entry.event != nullptr && !events_.contains(entry.event)) return cudaErrorInvalidResourceHandle;
    replay(*graph, target);
  }
  for (const auto& function : graph->recording->at_launch) function();
  return cudaSuccess;
}

void Scheduler::replay(const CUgraphExec_st& graph, CUstream_st& stream) {
  const auto begin = std::make_shared<Mark>(), end = std::make_shared<Mark>();
  const auto* start = new Operation{[](Team&) {}};  // orders what the host has done before the graph
  tsan_release(const_cast<Operation*>(start));
  push_ordered(stream, {nullptr, start, begin});
  CUstream_st& origin = *graph.streams.front();
  push(origin, {begin, nullptr, nullptr});
  const size_t entries = graph.recording->entries.size();
  Marks marks(entries);
  for (size_t i = 0; i < entries; ++i) replay_entry(graph, i, marks);
  push(origin, {nullptr, nullptr, end});
  push_ordered(stream, {end, nullptr, nullptr});
}

void Scheduler::replay_entry(const CUgraphExec_st& graph, size_t position, Marks& marks) {
  using Kind = Recording::Kind;
  const Recording::Entry& entry = graph.recording->entries[position];
  CUstream_st& branch = *graph.streams[entry.branch];
  switch (entry.kind) {
    case Kind::kOperation:
      return push(branch, {nullptr, &entry.operation, nullptr, true});
    case Kind::kRecord:
      marks[position] = std::make_shared<Mark>();
      return push(branch, {nullptr, nullptr, marks[position]});
    case Kind::kWait:
      return push(branch, {marks[entry.awaited], nullptr, nullptr});
    case Kind::kRecordEvent:
      entry.event->captured.reset();
      entry.event->mark = std::make_shared<Mark>();
      return push(branch, {nullptr, nullptr, entry.event->mark});
    case Kind::kWaitForEvent:
      return push(branch, {entry.event->mark, nullptr, nullptr});
  }
}

}  // namespace sim

using sim::finish;

namespace {

sim::Scheduler& scheduler() {
  return sim::device().scheduler;
}

bool valid(cudaStreamCaptureMode mode) {
  return mode == cudaStreamCaptureModeGlobal || mode == cudaStreamCaptureModeThreadLocal ||
         mode == cudaStreamCaptureModeRelaxed;
}

}  // namespace

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  if (!valid(mode)) return finish(cudaErrorInvalidValue);
  if (sim::failure() != cudaSuccess) return finish();
  return finish(scheduler().begin_capture(stream, mode));
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (graph == nullptr) return finish(cudaErrorInvalidValue);
  *graph = nullptr;
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  const cudaError_t error = scheduler().end_capture(stream, graph);
  if (*graph != nullptr && sim::failure() != cudaSuccess)
    scheduler().destroy_graph(std::exchange(*graph, nullptr));
  return finish(error);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id) {
  if (status == nullptr) return finish(cudaErrorInvalidValue);
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  uint64_t capture = 0;
  const cudaError_t error = scheduler().capture_status(stream, *status, capture);
  if (id != nullptr) *id = capture;
  return finish(error);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  if (mode == nullptr || !valid(*mode)) return finish(cudaErrorInvalidValue);
  std::swap(*mode, sim::thread_capture_mode());
  return finish();
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  if (executable == nullptr || !scheduler().exists(graph)) return finish(cudaErrorInvalidValue);
  if ((flags & ~uint64_t{cudaGraphInstantiateFlagUseNodePriority}) != 0) return finish(cudaErrorNotSupported);
  if (flags == cudaGraphInstantiateFlagUseNodePriority) sim::count_node_priority_graph();
  *executable = scheduler().instantiate(graph);
  return finish();
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  if (!scheduler().exists(executable)) return finish(cudaErrorInvalidValue);
  if (!scheduler().exists(stream)) return finish(cudaErrorInvalidResourceHandle);
  if (sim::failure() != cudaSuccess) return finish();
  if (const cudaError_t error = scheduler().launch(executable, stream)) return finish(error);
  return cudaSuccess;  // also when a kernel has already failed: that is for the next call to say
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  if (!scheduler().exists(graph)) return finish(cudaErrorInvalidValue);
  scheduler().destroy_graph(graph);
  return finish();
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  if (!scheduler().exists(executable)) return finish(cudaErrorInvalidValue);
  scheduler().destroy_graph(executable);
  return finish();
}
