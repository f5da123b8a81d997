// Blocks, threads, barriers, warp collectives, atomics and shared memory of the simulated device.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_fixture.h"
#include "kernels/device/shared.h"
#include "sim/counters.h"

namespace minillm {
namespace {

using kernels::dynamic_shared;
using kernels::launch;
using kernels::shared;

class Simt : public DeviceTest {};

__device__ unsigned thread_rank() {
  return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
__device__ unsigned block_rank() {
  return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
}

__global__ void write_own_place(uint3* threads, uint3* blocks) {
  const unsigned i = block_rank() * (blockDim.x * blockDim.y * blockDim.z) + thread_rank();
  threads[i] = threadIdx;
  blocks[i] = blockIdx;
}

TEST_F(Simt, EveryThreadOfEveryBlockRunsOnceAtItsPlace) {
  const dim3 grid(3, 5, 2), block(7, 3, 4);
  const size_t count = 30 * 84;
  Array<uint3> threads(count), blocks(count);
  launch("write_own_place", write_own_place, shape(grid, block), threads.get(), blocks.get());
  ASSERT_EQ(failure_of_stream(), "");
  const auto t = threads.read(), b = blocks.read();
  for (size_t i = 0; i < count; ++i) {
    const unsigned in_block = i % 84, of_grid = i / 84;
    EXPECT_EQ(t[i].x, in_block % 7);
    EXPECT_EQ(t[i].y, in_block / 7 % 3);
    EXPECT_EQ(t[i].z, in_block / 21);
    EXPECT_EQ(b[i].x, of_grid % 3);
    EXPECT_EQ(b[i].y, of_grid / 3 % 5);
    EXPECT_EQ(b[i].z, of_grid / 15);
  }
}

struct Exchange {
  int value[256];
};
/// Ping-pong over shared memory: wrong as soon as one barrier lets a thread through early.
__global__ void rotate(int* out, int rounds) {
  Exchange& exchange = shared<Exchange>();
  const int n = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
  int value = me;
  for (int i = 0; i < rounds; ++i) {
    exchange.value[me] = value;
    __syncthreads();
    value = exchange.value[(me + 1) % n];
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

TEST_F(Simt, BarriersOrderSharedMemoryInEveryOrderOfThreadsAndBlocks) {
  for (const char* order : {"forward", "reverse", "shuffle:1", "shuffle:2"}) {
    SCOPED_TRACE(order);
    sim::set_order(order);
    for (unsigned threads : {1u, 31u, 64u, 200u}) {
      constexpr unsigned kBlocks = 9;  // more than there are workers
      Array<int> out(kBlocks * threads);
      launch("rotate", rotate, shape(dim3(kBlocks), dim3(threads)), out.get(), 3);
      ASSERT_EQ(failure_of_stream(), "");
      const auto values = out.read();
      for (unsigned i = 0; i < values.size(); ++i)
        EXPECT_EQ(values[i], static_cast<int>((i % threads + 3) % threads));
    }
  }
}

__global__ void append_rank(unsigned* log, unsigned* length) {
  log[atomicAdd(length, 1u)] = block_rank() * 100 + thread_rank();
}

TEST_F(Simt, OrderSettingChangesWhoComesFirst) {
  const auto sequence = [&](const char* order) {
    sim::set_order(order);
    Array<unsigned> log(12), length(std::vector<unsigned>{0});
    launch("append_rank", append_rank, shape(dim3(3), dim3(4)), log.get(), length.get());
    EXPECT_EQ(failure_of_stream(), "");
    return log.read();
  };
  sim::set_workers(1);  // one worker: the log is the order
  cudaStreamDestroy(stream_);
  cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  const std::vector<unsigned> forward = {0, 1, 2, 3, 100, 101, 102, 103, 200, 201, 202, 203};
  EXPECT_EQ(sequence("forward"), forward);
  EXPECT_EQ(sequence("reverse"), std::vector<unsigned>(forward.rbegin(), forward.rend()));
  const auto shuffled = sequence("shuffle:5");
  EXPECT_NE(shuffled, forward);
  EXPECT_EQ(sequence("shuffle:5"), shuffled);
  EXPECT_NE(sequence("shuffle:6"), shuffled);
  EXPECT_TRUE(std::is_permutation(shuffled.begin(), shuffled.end(), forward.begin(), forward.end()));
  sim::set_workers(2);
}

__global__ void shuffles(int* out) {
  const int lane = static_cast<int>(threadIdx.x);
  int* mine = out + lane * 6;
  mine[0] = __shfl_sync(~0u, lane * 10, 5);
  mine[1] = __shfl_up_sync(~0u, lane, 3);
  mine[2] = __shfl_down_sync(~0u, lane, 3, 16);
  mine[3] = __shfl_xor_sync(~0u, lane, 9);
  mine[4] = __shfl_sync(~0u, lane, 33, 8);
  mine[5] = static_cast<int>(__shfl_xor_sync(~0u, static_cast<unsigned long long>(lane) << 40, 1) >> 40);
}

TEST_F(Simt, ShufflesReadTheLaneThatCudaDefines) {
  Array<int> out(32 * 6);
  launch("shuffles", shuffles, shape(dim3(1), dim3(32)), out.get());
  ASSERT_EQ(failure_of_stream(), "");
  const auto v = out.read();
  for (int lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(v[lane * 6], 50);
    EXPECT_EQ(v[lane * 6 + 1], lane < 3 ? lane : lane - 3);
    EXPECT_EQ(v[lane * 6 + 2], lane % 16 + 3 > 15 ? lane : lane + 3);
    EXPECT_EQ(v[lane * 6 + 3], lane ^ 9);
    EXPECT_EQ(v[lane * 6 + 4], lane / 8 * 8 + 1);
    EXPECT_EQ(v[lane * 6 + 5], lane ^ 1);
  }
}

/// Halves of a warp meet separately and a different number of times.
__global__ void partial_masks(float* sum, unsigned* votes) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  float value = static_cast<float>(lane);
  for (int step = 8; step > 0; step /= 2) value += __shfl_xor_sync(mask, value, step);
  if (lane >= 16) value += __shfl_sync(mask, value, 16, 32);
  sum[threadIdx.x] = value;
  votes[threadIdx.x * 3] = __ballot_sync(mask, lane % 3 == 0);
  votes[threadIdx.x * 3 + 1] = static_cast<unsigned>(__any_sync(mask, lane == 20));
  votes[threadIdx.x * 3 + 2] = static_cast<unsigned>(__all_sync(mask, lane < 16));
}

TEST_F(Simt, PartialMasksMeetSeparately) {
  Array<float> sum(64);
  Array<unsigned> votes(64 * 3);
  launch("partial_masks", partial_masks, shape(dim3(1), dim3(64)), sum.get(), votes.get());
  ASSERT_EQ(failure_of_stream(), "");
  const auto s = sum.read();
  const auto v = votes.read();
  for (unsigned i = 0; i < 64; ++i) {
    const bool low = i % 32 < 16;
    EXPECT_EQ(s[i], low ? 120.0f : 2 * 376.0f);
    EXPECT_EQ(v[i * 3], 0x49249249u & (low ? 0x0000ffffu : 0xffff0000u));
    EXPECT_EQ(v[i * 3 + 1], low ? 0u : 1u);
    EXPECT_EQ(v[i * 3 + 2], low ? 1u : 0u);
  }
}

__global__ void read_outside_mask(float* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_down_sync(0xffu, 1.0f, 4);
}

TEST_F(Simt, ValueOfALaneOutsideTheMaskIsPoison) {
  Array<float> out(8);
  launch("read_outside_mask", read_outside_mask, shape(dim3(1), dim3(32)), out.get());
  ASSERT_EQ(failure_of_stream(), "");
  const auto v = out.read();
  for (int i = 0; i < 8; ++i) EXPECT_EQ(std::isnan(v[i]), i >= 4) << i;
}

__global__ void atomics(int* sum, unsigned* largest, int* smallest, unsigned long long* wide, int* winners) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(sum, i);
  atomicMax(largest, static_cast<unsigned>(i));
  atomicMin(smallest, -i);
  atomicAdd(wide, 1ull << 33);
  if (atomicCAS(&winners[0], -1, i) == -1) winners[1] = i;
}

TEST_F(Simt, IntegerAtomicsLoseNothing) {
  Array<int> sum(std::vector<int>{0}), smallest(std::vector<int>{0}), winners(std::vector<int>{-1, -1});
  Array<unsigned> largest(std::vector<unsigned>{0});
  Array<unsigned long long> wide(std::vector<unsigned long long>{0});
  launch("atomics", atomics, shape(dim3(50), dim3(40)), sum.get(), largest.get(), smallest.get(), wide.get(),
         winners.get());
  ASSERT_EQ(failure_of_stream(), "");
  EXPECT_EQ(sum.read()[0], 2000 * 1999 / 2);
  EXPECT_EQ(largest.read()[0], 1999u);
  EXPECT_EQ(smallest.read()[0], -1999);
  EXPECT_EQ(wide.read()[0], 2000ull << 33);
  EXPECT_EQ(winners.read()[0], winners.read()[1]);
}

/// The last block to arrive adds up what the others wrote: fences and atomics order memory between blocks.
struct IsLast {
  bool value;
};
__global__ void sum_by_last_block(float* partial, unsigned* arrived, float* total) {
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = static_cast<float>(blockIdx.x);
    __threadfence();
    shared<IsLast>().value = atomicAdd(arrived, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!shared<IsLast>().value || threadIdx.x != 1) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += partial[i];
  *total = sum;
}

TEST_F(Simt, FenceAndAtomicOrderBlocks) {
  Array<float> partial(64), total(1);
  Array<unsigned> arrived(std::vector<unsigned>{0});
  launch("sum_by_last_block", sum_by_last_block, shape(dim3(64), dim3(32)), partial.get(), arrived.get(),
         total.get());
  ASSERT_EQ(failure_of_stream(), "");
  EXPECT_EQ(total.read()[0], 64.0f * 63 / 2);
}

struct Scratch {
  uint32_t word[5];
};
__global__ void read_fresh_shared(uint32_t* out, unsigned dynamic_words) {
  Scratch& scratch = shared<Scratch>();
  auto* dynamic = dynamic_shared<uint32_t>();
  uint32_t all = ~0u;
  if (threadIdx.x == 0) {
    for (uint32_t word : scratch.word) all &= word;
    for (unsigned i = 0; i < dynamic_words; ++i) all &= dynamic[i];
    out[blockIdx.x] = all;
  }
  __syncthreads();
  if (threadIdx.x < 5) scratch.word[threadIdx.x] = 0;
  if (threadIdx.x < dynamic_words) dynamic[threadIdx.x] = 0;
}

TEST_F(Simt, SharedMemoryIsPoisonedForEveryBlock) {
  Array<uint32_t> out(20);
  launch("read_fresh_shared", read_fresh_shared, shape(dim3(20), dim3(32), 28), out.get(), 7u);
  ASSERT_EQ(failure_of_stream(), "");
  for (uint32_t word : out.read()) EXPECT_EQ(word, ~0u);
}

// --- misuse that would hang or be undefined on a GPU ------------------------------------------------------

__global__ void early_return(unsigned leaver) {
  if (threadIdx.x == leaver) return;
  __syncthreads();
}

TEST_F(Simt, BarrierThatAThreadNeverReachesNamesKernelBlockAndThreads) {
  launch("early_return", early_return, shape(dim3(1), dim3(64)), 5u);
  EXPECT_EQ(
      failure_of_stream(),
      "kernel 'early_return', block (0, 0, 0): threads wait for others that never arrive: 0-4, 6-63 wait "
      "in __syncthreads; 5 returned (of 64 threads)");
  EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure) << "sticky";
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
  sim::clear_failure();
  launch("early_return", early_return, shape(dim3(4), dim3(64)), 64u);
  EXPECT_EQ(failure_of_stream(), "") << "the workers stay usable";
}

__global__ void different_barriers() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncwarp(threadIdx.x < 40 ? 0xffffu : 0xffffu << 16);
}

TEST_F(Simt, ThreadsThatWaitInDifferentPlacesAreListed) {
  launch("different_barriers", different_barriers, shape(dim3(1, 1), dim3(64)));
  const std::string text = failure_of_stream();
  EXPECT_NE(text.find("0xffff0000 lacks the caller's lane"), std::string::npos) << text;
}

__global__ void half_a_warp_votes() {
  if (threadIdx.x < 16) __ballot_sync(~0u, 1);
  __syncthreads();
}

TEST_F(Simt, CollectiveThatALaneNeverReachesIsAnError) {
  launch("half_a_warp_votes", half_a_warp_votes, shape(dim3(1), dim3(32)));
  EXPECT_EQ(
      failure_of_stream(),
      "kernel 'half_a_warp_votes', block (0, 0, 0): threads wait for others that never arrive: 0-15 wait in "
      "__ballot_sync; 16-31 wait in __syncthreads (of 32 threads)");
}

__global__ void shuffle_against_vote() {
  if (threadIdx.x % 2 == 0)
    __shfl_sync(~0u, 1, 0);
  else
    __any_sync(~0u, 1);
}

TEST_F(Simt, DifferentCollectivesDoNotMeet) {
  launch("shuffle_against_vote", shuffle_against_vote, shape(dim3(1), dim3(32)));
  EXPECT_EQ(
      failure_of_stream(),
      "kernel 'shuffle_against_vote', block (0, 0, 0), thread 1: __any_sync meets __shfl_sync of other lanes "
      "of its warp");
}

__global__ void vote_of(unsigned mask, unsigned lanes) {
  if (threadIdx.x < lanes) __all_sync(mask, 1);
}

TEST_F(Simt, MasksAreChecked) {
  launch("vote_of", vote_of, shape(dim3(1), dim3(32)), 0xfeu, 8u);
  EXPECT_EQ(
      failure_of_stream(),
      "kernel 'vote_of', block (0, 0, 0), thread 0: __all_sync: mask 0x000000fe lacks the caller's lane 0");
  sim::clear_failure();
  launch("vote_of", vote_of, shape(dim3(1), dim3(20)), ~0u, 20u);
  EXPECT_EQ(
      failure_of_stream(),
      "kernel 'vote_of', block (0, 0, 0), thread 0: __all_sync: mask 0xffffffff names lanes beyond the 20 "
      "threads of the warp");
}

__global__ void throw_in_thread(int thread) {
  __syncthreads();
  if (static_cast<int>(threadIdx.x) == thread) throw std::out_of_range("index 12 of 10");
  __syncthreads();
}

TEST_F(Simt, ExceptionOfAThreadBecomesTheFailure) {
  launch("throw_in_thread", throw_in_thread, shape(dim3(1), dim3(96)), 40);
  EXPECT_EQ(failure_of_stream(), "kernel 'throw_in_thread', block (0, 0, 0), thread 40: index 12 of 10");
  EXPECT_EQ(cudaMalloc(static_cast<void**>(nullptr), 4), cudaErrorLaunchFailure);
}

// --- launches ---------------------------------------------------------------------------------------------

__global__ void nothing() {}

TEST_F(Simt, LaunchLimitsAreThoseOfTheDevice) {
  const auto code = [&](dim3 grid, dim3 block, size_t shared_bytes) {
    const cudaError_t result = sim::launch("nothing", grid, block, shared_bytes, stream_, nothing);
    cudaGetLastError();
    return result;
  };
  EXPECT_EQ(code(dim3(1), dim3(1024), 227 * 1024), cudaSuccess);
  EXPECT_EQ(code(dim3(1), dim3(1025), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(code(dim3(1), dim3(32, 33), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(code(dim3(1), dim3(1, 1, 65), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(code(dim3(1, 65536), dim3(1), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(code(dim3(1, 1, 65536), dim3(1), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(code(dim3(0), dim3(1), 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(code(dim3(1), dim3(1), 227 * 1024 + 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(code(dim3(100000), dim3(1), 0), cudaSuccess);
  EXPECT_EQ(sim::launch("nothing", dim3(1), dim3(1), 0, reinterpret_cast<cudaStream_t>(this), nothing),
            cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "not sticky";
}

TEST_F(Simt, LaunchesAreCountedByName) {
  sim::reset_counters();
  for (int i = 0; i < 3; ++i) launch("nothing", nothing, shape(dim3(2), dim3(3)));
  launch("nothing", nothing, shape(dim3(0), dim3(3)));  // an empty grid is no launch
  launch("something", nothing, shape(dim3(1), dim3(1)));
  EXPECT_EQ(failure_of_stream(), "");
  const auto launches = sim::counters().launches;
  EXPECT_EQ(launches, (std::map<std::string, int64_t>{{"nothing", 3}, {"something", 1}}));
}

}  // namespace
}  // namespace minillm
