#include "cuda/graph.h"

#include <memory>
#include <type_traits>
#include <utility>

#include "cuda/check.h"

namespace minillm::cuda {
namespace {

struct DestroyRecorded {
  void operator()(cudaGraph_t graph) const { (void)cudaGraphDestroy(graph); }
};
using Recorded = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyRecorded>;

}  // namespace

Graph::Graph(cudaGraph_t recorded) {
  // Else all of it runs with the priority of the stream of the launch, and collectives no longer go first.
  check(cudaGraphInstantiate(&executable_, recorded, cudaGraphInstantiateFlagUseNodePriority));
}

Graph Graph::capture(cudaStream_t stream, const std::function<void()>& work) {
  // Thread-local: the watchdog and NCCL's own threads poll while this thread captures, which the global mode
  // would take for a mistake. The relaxed mode would let this thread's mistakes pass: an allocation in `work`
  // happens once, not at each launch.
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    // Also of a capture that is no longer valid: it ends, and the streams are free again.
    (void)cudaStreamEndCapture(stream, &graph);
    const Recorded unfinished(graph);
    (void)cudaGetLastError();  // the cause is on its way
    throw;
  }
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  const Recorded recorded(graph);
  check(ended);
  return Graph(recorded.get());
}

Graph::~Graph() {
  if (executable_) (void)cudaGraphExecDestroy(executable_);
}

Graph::Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(executable_, other.executable_);
  return *this;
}

void Graph::launch(cudaStream_t stream) const {
  check(cudaGraphLaunch(executable_, stream));
}

}  // namespace minillm::cuda
