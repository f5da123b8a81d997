// Graphs with collectives on every rank of a job: two communicators on two streams, replayed, among eager
// collectives of the same communicators.
#include <gtest/gtest.h>

#include <algorithm>

#include "cuda/graph.h"
#include "ranks.h"
#if !defined(CUDART_VERSION)
#include "sim/counters.h"
#endif

namespace minillm::comm {
namespace {

using test::DeviceArray;
using test::job;

constexpr int64_t kCount = 1000;
constexpr int kReplays = 20;

size_t elements(int64_t count) {
  return static_cast<size_t>(count);
}

/// Small integers, so that sums are exact in any order.
float shard_value(int rank, int round, int64_t i) {
  return static_cast<float>((rank * 7 + round * 5 + i * 3) % 11 - 5);
}
float gradient_value(int rank, int round, int64_t i) {
  return static_cast<float>((rank * 3 + round * 2 + i) % 9 - 4);
}

/// A step in miniature: the shard is uploaded and gathered; what was gathered is downloaded while gradients
/// are scattered and a norm is summed, by one communicator on two streams; all streams join.
class Step {
 public:
  void set_inputs(int round) {
    auto* shard = reinterpret_cast<float*>(host_shard_.data());
    auto* gradient = reinterpret_cast<float*>(host_gradient_.data());
    for (int64_t i = 0; i < kCount; ++i) shard[i] = shard_value(rank_, round, i);
    for (int64_t i = 0; i < kCount * size_; ++i) gradient[i] = gradient_value(rank_, round, i);
    *reinterpret_cast<float*>(host_norm_.data()) = static_cast<float>(rank_ + round);
  }

  void enqueue(cudaStream_t compute) {
    copy(shard_.data(), host_shard_, cudaMemcpyHostToDevice, compute);
    copy(gradient_.data(), host_gradient_, cudaMemcpyHostToDevice, compute);
    copy(norm_.data(), host_norm_, cudaMemcpyHostToDevice, compute);
    uploaded_.record(compute);
    uploaded_.wait_on(gather_stream_.get());
    uploaded_.wait_on(reduce_stream_.get());
    gather_.all_gather(full_.data(), shard_.data(), kCount, DType::kFp32, gather_stream_.get());
    reduce_.reduce_scatter(sum_.data(), gradient_.data(), kCount, DType::kFp32, reduce_stream_.get());
    reduce_.all_reduce(norm_.data(), 1, gather_stream_.get());
    gathered_.record(gather_stream_.get());
    reduced_.record(reduce_stream_.get());
    gathered_.wait_on(compute);
    reduced_.wait_on(compute);
    download(host_full_, full_.data(), compute);
    download(host_sum_, sum_.data(), compute);
    download(host_norm_sum_, norm_.data(), compute);
  }

  void expect_results(int round) {
    const auto* full = reinterpret_cast<const float*>(host_full_.data());
    const auto* sum = reinterpret_cast<const float*>(host_sum_.data());
    for (int64_t i = 0; i < kCount * size_; ++i)
      ASSERT_EQ(full[i], shard_value(static_cast<int>(i / kCount), round, i % kCount)) << i;
    float norm = 0;
    for (int r = 0; r < size_; ++r) norm += static_cast<float>(r + round);
    ASSERT_EQ(*reinterpret_cast<const float*>(host_norm_sum_.data()), norm);
    for (int64_t i = 0; i < kCount; ++i) {
      float expected = 0;
      for (int r = 0; r < size_; ++r) expected += gradient_value(r, round, rank_ * kCount + i);
      ASSERT_EQ(sum[i], expected) << i;
    }
  }

  Communicator& gather() { return gather_; }
  Communicator& reduce() { return reduce_; }

 private:
  static void copy(float* to, const cuda::PinnedMemory& from, cudaMemcpyKind kind, cudaStream_t stream) {
    cuda::check(cudaMemcpyAsync(to, from.data(), static_cast<size_t>(from.bytes()), kind, stream));
  }
  static void download(const cuda::PinnedMemory& to, const float* from, cudaStream_t stream) {
    cuda::check(
        cudaMemcpyAsync(to.data(), from, static_cast<size_t>(to.bytes()), cudaMemcpyDeviceToHost, stream));
  }

  const int rank_ = job()->rank(), size_ = job()->size();
  cuda::PinnedMemory host_shard_{kCount * 4}, host_gradient_{kCount * 4 * size_}, host_norm_{4};
  cuda::PinnedMemory host_full_{kCount * 4 * size_}, host_sum_{kCount * 4}, host_norm_sum_{4};
  DeviceArray<float> shard_{std::vector<float>(elements(kCount))}, sum_{std::vector<float>(elements(kCount))};
  DeviceArray<float> full_{std::vector<float>(elements(kCount * size_))};
  DeviceArray<float> gradient_{std::vector<float>(elements(kCount * size_))}, norm_{std::vector<float>(1)};
  cuda::Stream gather_stream_, reduce_stream_;
  cuda::Event uploaded_, gathered_, reduced_;
  Communicator gather_{*job(), {.name = "gather"}}, reduce_{*job(), {.name = "reduce"}};
};

void replay_step(Step& step, const cuda::Graph& graph, const cuda::Stream& stream, int round) {
  step.set_inputs(round);
  graph.launch(stream.get());
  stream.synchronize();
  step.expect_results(round);
}

TEST(GraphCollectives, ReplaysSeeNewInputs) {
  Step step;
  const cuda::Stream compute;
  step.set_inputs(0);
  step.enqueue(compute.get());
  compute.synchronize();
  step.expect_results(0);
  const cuda::Graph graph = cuda::Graph::capture(compute.get(), [&] { step.enqueue(compute.get()); });
  for (int round = 1; round <= kReplays; ++round) {
    replay_step(step, graph, compute, round);
    if (::testing::Test::HasFatalFailure()) return;
  }
  step.set_inputs(kReplays + 1);
  step.enqueue(compute.get());
  compute.synchronize();
  step.expect_results(kReplays + 1);
}

#if defined(MINILLM_NCCL_STAND_IN)
/// The first collectives of all are captured: staging memory of the stand-in grows in the capture.
TEST(GraphCollectives, NothingHasToRunBefore) {
  Step step;
  const cuda::Stream compute;
  const cuda::Graph graph = cuda::Graph::capture(compute.get(), [&] { step.enqueue(compute.get()); });
  replay_step(step, graph, compute, 1);
  replay_step(step, graph, compute, 2);
}
#endif

/// Eager collectives of both communicators, on streams that neither wait for the graph nor are waited for:
/// each communicator's collectives still run in the order in which they are issued and launched.
TEST(GraphCollectives, MixWithEagerOnesOnOtherStreams) {
  Step step;
  const cuda::Stream compute, first, second;
  const DeviceArray<float> power({1.0f}), ones(std::vector<float>(elements(kCount), 1));
  const DeviceArray<float> full(std::vector<float>(elements(kCount * job()->size())));
  const auto eager = [&] {
    step.reduce().all_reduce(power.data(), 1, first.get());
    step.gather().all_gather(full.data(), ones.data(), kCount, DType::kFp32, second.get());
  };
  eager();
  const cuda::Graph graph = cuda::Graph::capture(compute.get(), [&] { step.enqueue(compute.get()); });
  eager();
  for (int round = 0; round < kReplays; ++round) {
    step.set_inputs(round);
    graph.launch(compute.get());
    if (round % 5 == 0) eager();
    graph.launch(compute.get());
    compute.synchronize();
    step.expect_results(round);
    if (::testing::Test::HasFatalFailure()) return;
  }
  eager();
  first.synchronize();
  second.synchronize();
  float expected = 1;
  for (int i = 0; i < 3 + kReplays / 5; ++i) expected *= static_cast<float>(job()->size());
  EXPECT_EQ(power.download(), std::vector<float>{expected});
  EXPECT_EQ(full.download(), std::vector<float>(elements(kCount * job()->size()), 1));
}

#if !defined(CUDART_VERSION)
TEST(GraphCollectives, AreCountedAtEachLaunch) {
  Step step;
  const cuda::Stream compute;
  sim::reset_counters();
  const cuda::Graph graph = cuda::Graph::capture(compute.get(), [&] { step.enqueue(compute.get()); });
  EXPECT_TRUE(sim::counters().collectives.empty());
  for (int replay = 0; replay < 3; ++replay) graph.launch(compute.get());
  compute.synchronize();
  const sim::CollectiveCount count = sim::counters().collectives["ncclReduceScatter"];
  EXPECT_EQ(count.calls, 3);
  EXPECT_EQ(count.bytes, 3 * kCount * 4);
}
#endif

}  // namespace
}  // namespace minillm::comm

int main(int argc, char** argv) {
  return minillm::test::run_on_ranks(argc, argv);
}
