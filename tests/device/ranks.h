// What tests that run under mpirun share: the job's bootstrap, device and host copies of float arrays.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

#if !defined(CUDART_VERSION) || defined(MINILLM_SHARED_GPU)
// The NCCL stand-in: one device serves all ranks, sums add in rank order, mismatches are errors.
#define MINILLM_NCCL_STAND_IN 1
#endif

namespace minillm::test {

inline comm::Bootstrap*& job() {
  static comm::Bootstrap* bootstrap = nullptr;
  return bootstrap;
}

/// Device memory that holds `values`, filled on the default stream before the constructor returns.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values)
      : memory_(static_cast<int64_t>(values.size() * sizeof(T))), count_(values.size()) {
    if (count_ > 0)
      cuda::check(cudaMemcpy(data(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  std::vector<T> download() const {
    std::vector<T> values(count_);
    if (count_ > 0)
      cuda::check(cudaMemcpy(values.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  cuda::DeviceMemory memory_;
  size_t count_;
};

/// Runs the tests of a program that has one process per rank.
inline int run_on_ranks(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const std::unique_ptr<comm::Bootstrap> bootstrap = comm::make_bootstrap(&argc, &argv);
  job() = bootstrap.get();
  int devices = 0;
  cuda::check(cudaGetDeviceCount(&devices));
#if !defined(MINILLM_NCCL_STAND_IN)
  if (devices < bootstrap->local_size()) {
    std::printf("skipped: %d ranks need a GPU each, there are %d\n", bootstrap->local_size(), devices);
    return 0;
  }
#endif
  cuda::check(cudaSetDevice(bootstrap->local_rank() % devices));
  const int failed = RUN_ALL_TESTS();
  return bootstrap->max(failed) == 0 ? 0 : 1;
}

}  // namespace minillm::test
