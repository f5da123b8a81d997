#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <exception>

#include "cuda/check.h"
#include "ranks.h"

namespace minillm::shard {
namespace {

std::unique_ptr<comm::Bootstrap> bootstrap;

}  // namespace

comm::Bootstrap& ranks() {
  return *bootstrap;
}

}  // namespace minillm::shard

int main(int argc, char** argv) {
  using minillm::shard::bootstrap;
  bootstrap = minillm::comm::make_bootstrap(&argc, &argv);
  testing::InitGoogleTest(&argc, argv);
  // An exception on one rank must end all, or the others wait for it.
  GTEST_FLAG_SET(catch_exceptions, false);
  int result = 1;
  try {
    int devices = 0;
    minillm::cuda::check(cudaGetDeviceCount(&devices));
    minillm::cuda::check(cudaSetDevice(bootstrap->local_rank() % devices));
    result = RUN_ALL_TESTS();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", bootstrap->rank(), error.what());
  }
  if (result != 0) bootstrap->abort(result);
  bootstrap.reset();
  return 0;
}
