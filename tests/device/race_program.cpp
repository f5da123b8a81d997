// A stream that communicates and one that computes, for race_test.sh: with the argument `wait` the product
// waits for the gather that fills its operand, with `no-wait` it does not, which ThreadSanitizer must report.
#include <cstring>
#include <string>

#include "cuda/gemm.h"
#include "ranks.h"

int main(int argc, char** argv) {
  using namespace minillm;
  const auto job = comm::make_bootstrap(&argc, &argv);
  const bool wait = std::string(argv[1]) == "wait";
  const int64_t shard = 64, n = shard * job->size();
  comm::Communicator communicator(*job, "gather");
  const cuda::Stream communicate, compute;
  const cuda::Event gathered;
  const cuda::DeviceMemory workspace(cuda::BlasLt::workspace_bytes());
  cuda::BlasLt blas(workspace.data());
  const test::DeviceArray<float> mine(std::vector<float>(static_cast<size_t>(shard), 1));
  const test::DeviceArray<float> row(std::vector<float>(static_cast<size_t>(n), 1));
  const test::DeviceArray<float> column(std::vector<float>(static_cast<size_t>(n), 1)), sum({0});

  communicator.all_gather(column.data(), mine.data(), shard, DType::kFp32, communicate.get());
  gathered.record(communicate.get());
  if (wait) gathered.wait_on(compute.get());
  cuda::Gemm dot;
  dot.m = dot.n = 1;
  dot.k = n;
  dot.a = row.data();
  dot.b = column.data();
  dot.d = sum.data();
  dot.input = dot.output = DType::kFp32;
  blas.run(dot, compute.get());
  communicate.synchronize();
  compute.synchronize();
  job->barrier();
  return !wait || sum.download()[0] == static_cast<float>(n) ? 0 : 1;
}
