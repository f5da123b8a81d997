// Collectives on every rank of a job: values, orders, streams, traffic.
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <cmath>

#include "bits.h"
#include "ranks.h"
#include "raw_communicator.h"

namespace minillm::comm {
namespace {

using test::DeviceArray;
using test::job;

/// Element `i` of rank `rank`: a small integer, so that sums are exact in any order; exact in bf16, too.
float integer(int rank, int64_t i) {
  return static_cast<float>((rank * 7 + i * 3) % 11 - 5);
}
/// Values whose fp32 sum depends on the order of the additions: mixed bits, 24 binary orders of magnitude.
[[maybe_unused]] float wild(int rank, int64_t i) {  // by the stand-in's tests only
  uint64_t bits = static_cast<uint64_t>(rank * 100003 + i) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ (bits >> 31)) * 0xbf58476d1ce4e5b9u;
  bits ^= bits >> 29;
  const auto mantissa = static_cast<float>(static_cast<int64_t>(bits >> 40) - (1 << 23));
  return std::ldexp(mantissa, static_cast<int>(bits % 24) - 23);
}

template <class T, class Value>
std::vector<T> values_of(int64_t count, Value value) {
  std::vector<T> result(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (sizeof(T) == 2)
      result[static_cast<size_t>(i)] = test::nearest_bf16(value(i));
    else
      result[static_cast<size_t>(i)] = value(i);
  }
  return result;
}

template <class Value>
float sum_over_ranks(Value value) {
  float sum = value(0);
  for (int rank = 1; rank < job()->size(); ++rank) sum += value(rank);
  return sum;
}

constexpr int64_t kCounts[] = {0, 1, 2, 3, 64, 1001, 40000};

template <class T>
void test_all_gather(DType type) {
  Communicator communicator(*job(), {.name = "gather"});
  cuda::Stream stream;
  const int rank = job()->rank(), size = job()->size();
  for (const int64_t count : kCounts) {
    const auto expected =
        values_of<T>(count * size, [&](int64_t i) { return integer(i / count, i % count); });
    const auto mine = values_of<T>(count, [&](int64_t i) { return integer(rank, i); });
    const DeviceArray<T> shard(mine), full(std::vector<T>(expected.size()));
    communicator.all_gather(full.data(), shard.data(), count, type, stream.get());
    stream.synchronize();
    EXPECT_EQ(full.download(), expected) << "count " << count;
    EXPECT_EQ(shard.download(), mine);

    std::vector<T> partly(expected.size());
    std::copy(mine.begin(), mine.end(), partly.begin() + rank * count);
    const DeviceArray<T> in_place(partly);
    communicator.all_gather(in_place.data(), in_place.data() + rank * count, count, type, stream.get());
    stream.synchronize();
    EXPECT_EQ(in_place.download(), expected) << "in place, count " << count;
  }
}

TEST(Collectives, AllGatherFp32) {
  test_all_gather<float>(DType::kFp32);
}
TEST(Collectives, AllGatherBf16) {
  test_all_gather<uint16_t>(DType::kBf16);
}

TEST(Collectives, ReduceScatter) {
  Communicator communicator(*job(), {.name = "reduce"});
  cuda::Stream stream;
  const int rank = job()->rank(), size = job()->size();
  for (const int64_t count : kCounts) {
    const auto mine = values_of<float>(count * size, [&](int64_t i) { return integer(rank, i); });
    const auto expected = values_of<float>(count, [&](int64_t i) {
      return sum_over_ranks([&](int r) { return integer(r, rank * count + i); });
    });
    const DeviceArray<float> full(mine), shard(std::vector<float>(static_cast<size_t>(count)));
    communicator.reduce_scatter(shard.data(), full.data(), count, DType::kFp32, stream.get());
    stream.synchronize();
    EXPECT_EQ(shard.download(), expected) << "count " << count;
    EXPECT_EQ(full.download(), mine);
    communicator.reduce_scatter(full.data() + rank * count, full.data(), count, DType::kFp32, stream.get());
    stream.synchronize();
    const std::vector<float> all = full.download();
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), all.begin() + rank * count))
        << "in place " << count;
  }
}

TEST(Collectives, AllReduce) {
  Communicator communicator(*job(), {.name = "reduce"});
  cuda::Stream stream;
  for (const int64_t count : kCounts) {
    const DeviceArray<float> values(
        values_of<float>(count, [&](int64_t i) { return integer(job()->rank(), i); }));
    communicator.all_reduce(values.data(), count, stream.get());
    stream.synchronize();
    EXPECT_EQ(values.download(),
              values_of<float>(
                  count, [&](int64_t i) { return sum_over_ranks([&](int r) { return integer(r, i); }); }))
        << "count " << count;
  }
}

TEST(Collectives, BroadcastFromEveryRoot) {
  const test::RawCommunicator comm;
  cuda::Stream stream;
  for (int root = 0; root < job()->size(); ++root) {
    for (const int64_t count : kCounts) {
      const DeviceArray<float> send(
          values_of<float>(count, [&](int64_t i) { return integer(job()->rank(), i); }));
      const DeviceArray<float> receive(std::vector<float>(static_cast<size_t>(count)));
      ASSERT_EQ(ncclBroadcast(send.data(), receive.data(), static_cast<size_t>(count), ncclFloat32, root,
                              comm.get(), stream.get()),
                ncclSuccess);
      stream.synchronize();
      EXPECT_EQ(receive.download(), values_of<float>(count, [&](int64_t i) { return integer(root, i); }));
    }
  }
}

TEST(Collectives, GroupsAndQueries) {
  const test::RawCommunicator comm;
  cuda::Stream stream;
  int rank = -1, size = -1, version = 0;
  EXPECT_EQ(ncclCommUserRank(comm.get(), &rank), ncclSuccess);
  EXPECT_EQ(ncclCommCount(comm.get(), &size), ncclSuccess);
  EXPECT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(rank, job()->rank());
  EXPECT_EQ(size, job()->size());
  EXPECT_GE(version, 20000);
  const DeviceArray<float> a({1}), b({2});
  EXPECT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(ncclAllReduce(a.data(), a.data(), 1, ncclFloat32, ncclSum, comm.get(), stream.get()),
            ncclSuccess);
  EXPECT_EQ(ncclAllReduce(b.data(), b.data(), 1, ncclFloat32, ncclSum, comm.get(), stream.get()),
            ncclSuccess);
  EXPECT_EQ(ncclGroupEnd(), ncclSuccess);
  stream.synchronize();
  EXPECT_EQ(a.download()[0], static_cast<float>(size));
  EXPECT_EQ(b.download()[0], static_cast<float>(2 * size));
  EXPECT_EQ(ncclAllReduce(a.data(), a.data(), 1, ncclFloat32, ncclSum, nullptr, stream.get()),
            ncclInvalidArgument);
  EXPECT_EQ(ncclAllReduce(nullptr, a.data(), 1, ncclFloat32, ncclSum, comm.get(), stream.get()),
            ncclInvalidArgument);
  ncclResult_t error = ncclInternalError;
  EXPECT_EQ(ncclCommGetAsyncError(comm.get(), &error), ncclSuccess);
  EXPECT_EQ(error, ncclSuccess);
}

#if defined(MINILLM_NCCL_STAND_IN)
template <class T>
void test_sums_in_rank_order(ncclDataType_t type) {
  const test::RawCommunicator comm;
  cuda::Stream stream;
  const int rank = job()->rank(), size = job()->size();
  constexpr int64_t kCount = 3001;
  // What each rank holds is rounded to T before the sum; the sum is fp32 and is rounded once.
  const auto held = [](int r, int64_t i) {
    return sizeof(T) == 2 ? test::bf16_value(test::nearest_bf16(wild(r, i))) : wild(r, i);
  };
  const auto sums = values_of<T>(
      kCount * size, [&](int64_t i) { return sum_over_ranks([&](int r) { return held(r, i); }); });
  const DeviceArray<T> full(values_of<T>(kCount * size, [&](int64_t i) { return wild(rank, i); }));
  const DeviceArray<T> shard(std::vector<T>(kCount, T{}));
  ASSERT_EQ(ncclReduceScatter(full.data(), shard.data(), kCount, type, ncclSum, comm.get(), stream.get()),
            ncclSuccess);
  stream.synchronize();
  EXPECT_EQ(shard.download(),
            std::vector<T>(sums.begin() + rank * kCount, sums.begin() + (rank + 1) * kCount));
  ASSERT_EQ(ncclAllReduce(full.data(), full.data(), static_cast<size_t>(kCount * size), type, ncclSum,
                          comm.get(), stream.get()),
            ncclSuccess);
  stream.synchronize();
  EXPECT_EQ(full.download(), sums);
}

TEST(Collectives, SumsInRankOrderFp32) {
  test_sums_in_rank_order<float>(ncclFloat32);
}
TEST(Collectives, SumsInRankOrderBf16) {
  test_sums_in_rank_order<uint16_t>(ncclBfloat16);
}

TEST(Collectives, UnsupportedSumsSaySo) {
  const test::RawCommunicator comm;
  const DeviceArray<double> values({1});
  EXPECT_EQ(ncclAllReduce(values.data(), values.data(), 1, ncclFloat64, ncclSum, comm.get(), nullptr),
            ncclInvalidArgument);
  EXPECT_STREQ(ncclGetLastError(comm.get()), "ncclAllReduce: sums exist for fp32 and bf16, not for fp64");
  EXPECT_EQ(ncclAllReduce(values.data(), values.data(), 1, ncclFloat32, ncclAvg, comm.get(), nullptr),
            ncclInvalidArgument);
}
#endif

TEST(Collectives, TwoCommunicatorsInFlightOnTwoStreams) {
  Communicator gather(*job(), {.name = "gather"}), reduce(*job(), {.name = "reduce"});
  cuda::Stream gather_stream, reduce_stream;
  const int rank = job()->rank(), size = job()->size();
  constexpr int64_t kCount = 5000;
  constexpr int kRounds = 12;
  std::vector<DeviceArray<float>> gathered, scattered;
  const DeviceArray<float> shard(values_of<float>(kCount, [&](int64_t i) { return integer(rank, i); }));
  const DeviceArray<float> full(values_of<float>(kCount * size, [&](int64_t i) { return integer(rank, i); }));
  for (int round = 0; round < kRounds; ++round) {
    gathered.emplace_back(std::vector<float>(static_cast<size_t>(kCount * size)));
    scattered.emplace_back(std::vector<float>(static_cast<size_t>(kCount)));
  }
  for (int round = 0; round < kRounds; ++round) {  // no synchronisation between the rounds, sizes vary
    const int64_t count = kCount - round * 100;
    gather.all_gather(gathered[round].data(), shard.data(), count, DType::kFp32, gather_stream.get());
    reduce.reduce_scatter(scattered[round].data(), full.data(), count, DType::kFp32, reduce_stream.get());
  }
  gather_stream.synchronize();
  reduce_stream.synchronize();
  for (int round = 0; round < kRounds; ++round) {
    const int64_t count = kCount - round * 100;
    const std::vector<float> g = gathered[round].download(), s = scattered[round].download();
    for (int64_t i = 0; i < count * size; ++i) ASSERT_EQ(g[i], integer(i / count, i % count)) << round;
    for (int64_t i = 0; i < count; ++i)
      ASSERT_EQ(s[i], sum_over_ranks([&](int r) { return integer(r, rank * count + i); })) << round;
  }
  EXPECT_EQ(gather.asynchronous_error(), "");
  EXPECT_EQ(reduce.asynchronous_error(), "");
}

TEST(Collectives, OneCommunicatorOnTwoStreams) {
  Communicator communicator(*job(), {.name = "both"});
  cuda::Stream first, second;
  const DeviceArray<float> a(std::vector<float>(1000, 1)), b(std::vector<float>(3000, 1));
  for (int round = 0; round < 5; ++round) {
    communicator.all_reduce(a.data(), 1000, first.get());
    communicator.all_reduce(b.data(), 3000, second.get());
  }
  first.synchronize();
  second.synchronize();
  const float expected = std::pow(static_cast<float>(job()->size()), 5.0f);
  EXPECT_EQ(a.download(), std::vector<float>(1000, expected));
  EXPECT_EQ(b.download(), std::vector<float>(3000, expected));
}

TEST(Collectives, TrafficFollowsTheRingFormulas) {
  Communicator communicator(*job(), {.name = "counted"});
  cuda::Stream stream;
  const int64_t size = job()->size();
  const DeviceArray<float> values(std::vector<float>(static_cast<size_t>(120 * size), 1));
  for (int i = 0; i < 3; ++i)
    communicator.all_gather(values.data(), values.data() + job()->rank() * 120, 120, DType::kFp32,
                            stream.get());
  communicator.all_gather(values.data(), values.data() + job()->rank() * 60, 120, DType::kBf16, stream.get());
  communicator.reduce_scatter(values.data() + job()->rank() * 120, values.data(), 120, DType::kFp32,
                              stream.get());
  communicator.all_reduce(values.data(), 120 * size, stream.get());
  stream.synchronize();
  const Traffic& traffic = communicator.traffic();
  EXPECT_EQ(traffic.all_gather_calls, 4);
  EXPECT_EQ(traffic.reduce_scatter_calls, 1);
  EXPECT_EQ(traffic.all_reduce_calls, 1);
  const int64_t full = 120 * size * 4;  // bytes
  EXPECT_EQ(traffic.all_gather_bytes * size, (3 * full + full / 2) * (size - 1));
  EXPECT_EQ(traffic.reduce_scatter_bytes * size, full * (size - 1));
  EXPECT_EQ(traffic.all_reduce_bytes * size, 2 * full * (size - 1));
}

TEST(Bootstrap, ExchangesHostValues) {
  const int rank = job()->rank(), size = job()->size();
  EXPECT_EQ(job()->max(rank * 10), (size - 1) * 10);
  EXPECT_EQ(job()->max(-rank), 0);
  int64_t value = rank + 40;
  job()->broadcast(std::as_writable_bytes(std::span(&value, 1)));
  EXPECT_EQ(value, 40);
  std::vector<int64_t> all(static_cast<size_t>(size), -1);
  const int64_t mine = rank * rank;
  job()->gather(job()->everyone(), std::as_bytes(std::span(&mine, 1)),
                std::as_writable_bytes(std::span(all)));
  for (int r = 0; r < size; ++r) EXPECT_EQ(all[static_cast<size_t>(r)], rank == 0 ? r * r : -1);
  EXPECT_GE(job()->local_size(), 1);
  EXPECT_LT(job()->local_rank(), job()->local_size());
  job()->barrier();
}

}  // namespace
}  // namespace minillm::comm

int main(int argc, char** argv) {
  return minillm::test::run_on_ranks(argc, argv);
}
