// A stream that communicates and one that computes, for race_test.sh: with the argument `wait` the product
// waits for the gather that fills its operand, with `no-wait` it does not, which ThreadSanitizer must report.
// With `graph` as well, both are branches of a graph.
#include <cstring>
#include <string>

#include "cuda/gemm.h"
#include "cuda/graph.h"
#include "ranks.h"

int main(int argc, char** argv) {
  using namespace minillm;
  const auto job = comm::make_bootstrap(&argc, &argv);
  const bool wait = std::string(argv[1]) == "wait", graph = std::string(argv[2]) == "graph";
  const int64_t shard = 64, n = shard * job->size();
  comm::Communicator communicator(*job, {.name = "gather"});
  const cuda::Stream communicate, compute;
  const cuda::Event forked, gathered;
  const cuda::DeviceMemory workspace(cuda::BlasLt::workspace_bytes());
  cuda::BlasLt blas(workspace.data());
  const test::DeviceArray<float> mine(std::vector<float>(static_cast<size_t>(shard), 1));
  const test::DeviceArray<float> row(std::vector<float>(static_cast<size_t>(n), 1));
  const test::DeviceArray<float> column(std::vector<float>(static_cast<size_t>(n), 1)), sum({0});
  cuda::Gemm dot;
  dot.m = dot.n = 1;
  dot.k = n;
  dot.a = row.data();
  dot.b = column.data();
  dot.d = sum.data();
  dot.input = dot.output = DType::kFp32;

  const auto work = [&] {
    forked.record(compute.get());
    forked.wait_on(communicate.get());
    communicator.all_gather(column.data(), mine.data(), shard, DType::kFp32, communicate.get());
    gathered.record(communicate.get());
    if (wait) gathered.wait_on(compute.get());
    blas.run(dot, compute.get());
    if (!wait) gathered.wait_on(compute.get());  // too late, but a capture wants its streams joined
  };
  if (graph) {
    const cuda::Graph step = cuda::Graph::capture(compute.get(), work);
    for (int launch = 0; launch < 3; ++launch) step.launch(compute.get());
    compute.synchronize();
  } else {
    work();
  }
  communicate.synchronize();
  compute.synchronize();
  job->barrier();
  return !wait || sum.download()[0] == static_cast<float>(n) ? 0 : 1;
}
