// Communicators over groups of the ranks, fused collectives, and what NCCL is asked for.
#include <gtest/gtest.h>
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "bits.h"
#include "core/error.h"
#include "ranks.h"
#include "raw_communicator.h"
#if !defined(CUDART_VERSION)
#include "sim/counters.h"
#endif

namespace minillm::comm {
namespace {

using test::DeviceArray;
using test::job;

/// A small integer that tells rank and index: sums are exact in any order.
float integer(int rank, int64_t i) {
  return static_cast<float>(rank * 1000 + i % 900);
}

std::vector<float> integers(int rank, int64_t count) {
  std::vector<float> result(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) result[static_cast<size_t>(i)] = integer(rank, i);
  return result;
}

std::vector<int> shard_sizes() {
  std::vector<int> sizes;
  for (int size = 1; size <= job()->size(); ++size)
    if (job()->size() % size == 0) sizes.push_back(size);
  return sizes;
}

/// Both groups of this rank when `size` ranks share a copy of the model.
struct Hybrid {
  explicit Hybrid(int size)
      : shard(shard_group(job()->rank(), job()->size(), size)),
        replica(replica_group(job()->rank(), job()->size(), size)) {}
  Group shard, replica;
};

void expect_gathered(const std::vector<float>& full, const Group& group, int64_t count) {
  for (int64_t i = 0; i < group.count * count; ++i)
    ASSERT_EQ(full[static_cast<size_t>(i)], integer(group.rank_at(static_cast<int>(i / count)), i % count))
        << i;
}

float sum_over(const Group& group, int64_t i) {
  float sum = 0;
  for (int position = 0; position < group.count; ++position) sum += integer(group.rank_at(position), i);
  return sum;
}

TEST(Groups, CollectivesStayWithinTheirGroup) {
  constexpr int64_t kCount = 700;
  cuda::Stream stream;
  const std::vector<float> mine = integers(job()->rank(), kCount);
  for (const int size : shard_sizes()) {
    SCOPED_TRACE("shard groups of " + std::to_string(size));
    const Hybrid hybrid(size);
    Communicator shard(*job(), {.name = "shard", .group = hybrid.shard});
    Communicator replica(*job(), {.name = "replica", .group = hybrid.replica});
    EXPECT_EQ(shard.size(), size);
    EXPECT_EQ(shard.rank(), job()->rank() % size);
    EXPECT_EQ(replica.size(), job()->size() / size);
    EXPECT_EQ(replica.rank(), job()->rank() / size);
    const DeviceArray<float> values(mine), full(std::vector<float>(static_cast<size_t>(size * kCount)));
    shard.all_gather(full.data(), values.data(), kCount, DType::kFp32, stream.get());
    replica.all_reduce(values.data(), kCount, stream.get());
    stream.synchronize();
    expect_gathered(full.download(), hybrid.shard, kCount);
    const std::vector<float> sums = values.download();
    for (int64_t i = 0; i < kCount; ++i)
      ASSERT_EQ(sums[static_cast<size_t>(i)], sum_over(hybrid.replica, i)) << i;
    EXPECT_EQ(shard.traffic().all_gather_bytes, (size - 1) * kCount * 4);
    const int64_t replicas = replica.size();
    EXPECT_EQ(replica.traffic().all_reduce_bytes, 2 * (replicas - 1) * kCount * 4 / replicas);
  }
}

TEST(Groups, ThreeCommunicatorsInFlight) {
  constexpr int64_t kCount = 3000;
  constexpr int kRounds = 8;
  for (const int size : shard_sizes()) {
    SCOPED_TRACE("shard groups of " + std::to_string(size));
    const Hybrid hybrid(size);
    Communicator gather(*job(), {.name = "gather", .group = hybrid.shard, .zero_ctas = true});
    Communicator reduce(*job(), {.name = "reduce", .group = hybrid.shard, .max_ctas = 4});
    Communicator replicate(*job(), {.name = "replicate", .group = hybrid.replica});
    cuda::Stream streams[3];
    const DeviceArray<float> shard(integers(job()->rank(), kCount)),
        full(integers(job()->rank(), kCount * size));
    std::vector<DeviceArray<float>> gathered, scattered, reduced;
    for (int round = 0; round < kRounds; ++round) {
      gathered.emplace_back(std::vector<float>(static_cast<size_t>(kCount * size)));
      scattered.emplace_back(std::vector<float>(static_cast<size_t>(kCount)));
      reduced.emplace_back(integers(job()->rank(), kCount));
    }
    for (int round = 0; round < kRounds; ++round) {  // no synchronisation in between
      const int64_t count = kCount - round * 100;
      gather.all_gather(gathered[round].data(), shard.data(), count, DType::kFp32, streams[0].get());
      reduce.reduce_scatter(scattered[round].data(), full.data(), count, DType::kFp32, streams[1].get());
      replicate.all_reduce(reduced[round].data(), count, streams[2].get());
    }
    for (const cuda::Stream& stream : streams) stream.synchronize();
    for (int round = 0; round < kRounds; ++round) {
      const int64_t count = kCount - round * 100;
      expect_gathered(gathered[round].download(), hybrid.shard, count);
      const std::vector<float> s = scattered[round].download(), r = reduced[round].download();
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(s[i], sum_over(hybrid.shard, gather.rank() * count + i)) << round;
        ASSERT_EQ(r[i], sum_over(hybrid.replica, i)) << round;
      }
    }
    for (const Communicator* c : {&gather, &reduce, &replicate}) EXPECT_EQ(c->asynchronous_error(), "");
  }
}

TEST(Groups, RanksOfNcclNeedNotBeThoseOfTheLauncher) {
  const int reversed = job()->size() - 1 - job()->rank();
  const test::RawCommunicator comm(reversed);
  cuda::Stream stream;
  const DeviceArray<float> mine({static_cast<float>(reversed)});
  const DeviceArray<float> all(std::vector<float>(static_cast<size_t>(job()->size())));
  ASSERT_EQ(ncclAllGather(mine.data(), all.data(), 1, ncclFloat32, comm.get(), stream.get()), ncclSuccess);
  stream.synchronize();
  const std::vector<float> values = all.download();
  for (int r = 0; r < job()->size(); ++r) EXPECT_EQ(values[r], static_cast<float>(r));
}

/// Expects the text on every rank: none is left waiting.
void expect_refused(const Group& group, const std::string& expected) {
  try {
    Communicator communicator(*job(), {.name = "planted", .group = group});
    ADD_FAILURE() << "groups that do not fit together were accepted";
  } catch (const CommunicationError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("communicator planted: "), std::string::npos) << text;
    EXPECT_NE(text.find(expected), std::string::npos) << text;
  }
}

TEST(Groups, HaveToDivideTheRanks) {
  const int rank = job()->rank(), size = job()->size();
  expect_refused(
      {.first = 0, .stride = 1, .count = size + 1},
      "rank 0 asks for the group of " + std::to_string(size + 1) + " ranks from 0 in steps of 1, but");
  expect_refused({.first = 0, .stride = 0, .count = 1}, "in steps of 0, but the job has the ranks 0 to ");
  if (size == 1) return;
  expect_refused({.first = 0, .stride = 1, .count = 1},
                 "rank 1 asks for the group of 1 ranks from 0 in steps of 1, "
                 "but is no member of it");
  const int last = size - 1;
  const Group all{.first = 0, .stride = 1, .count = size}, alone{.first = last, .stride = 1, .count = 1};
  expect_refused(rank == last ? alone : all, "but its member " + std::to_string(last) +
                                                 " for that of 1 ranks from " + std::to_string(last));
}

/// Values of mixed size and sign that bf16 holds exactly.
double bf16_input(int rank, int64_t i) {
  const auto bits = static_cast<uint64_t>(rank * 7919 + i + 1) * 0x9e3779b97f4a7c15u;
  const auto mantissa = static_cast<double>(static_cast<int>(bits >> 56) - 128);
  return std::ldexp(mantissa, static_cast<int>((bits >> 40) % 8));
}

TEST(Groups, ReduceScatterBf16AgainstFloat64) {
  constexpr int64_t kCount = 2003;
  for (const int size : shard_sizes()) {
    const Group group = shard_group(job()->rank(), job()->size(), size);
    Communicator communicator(*job(), {.name = "reduce", .group = group});
    cuda::Stream stream;
    std::vector<uint16_t> mine(static_cast<size_t>(size * kCount));
    for (size_t i = 0; i < mine.size(); ++i)
      mine[i] = test::nearest_bf16(bf16_input(job()->rank(), static_cast<int64_t>(i)));
    const DeviceArray<uint16_t> full(mine), shard(std::vector<uint16_t>(kCount, uint16_t{0}));
    communicator.reduce_scatter(shard.data(), full.data(), kCount, DType::kBf16, stream.get());
    stream.synchronize();
    const std::vector<uint16_t> result = shard.download();
    for (int64_t i = 0; i < kCount; ++i) {
      double sum = 0, magnitude = 0;
      for (int position = 0; position < size; ++position) {
        const double value = bf16_input(group.rank_at(position), communicator.rank() * kCount + i);
        sum += value;
        magnitude += std::fabs(value);
      }
#if defined(MINILLM_NCCL_STAND_IN)
      // These sums are exact in fp32 (8 bits, 8 binary orders of magnitude), so one rounding is the whole
      // error.
      const double tolerance = 0;
      sum = test::bf16_value(test::nearest_bf16(sum));
#else
      // Rings round to bf16 (half a unit in the last place is 2^-9) after each addition.
      const double tolerance = (size - 1) * magnitude * 0x1p-9 * 1.01;
#endif
      ASSERT_LE(std::fabs(test::bf16_value(result[static_cast<size_t>(i)]) - sum), tolerance)
          << i << " of magnitude " << magnitude;
    }
    EXPECT_EQ(communicator.traffic().reduce_scatter_bytes, (size - 1) * kCount * 2);
  }
}

TEST(Fused, CollectivesOfSegments) {
  const int rank = job()->rank(), size = job()->size();
  Communicator communicator(*job(), {.name = "gather"});
  cuda::Stream stream;
  const std::vector<int64_t> counts = {100, 1, 0, 640};
  std::vector<DeviceArray<float>> shards, fulls;
  for (const int64_t count : counts) {
    shards.emplace_back(integers(rank, count));
    fulls.emplace_back(std::vector<float>(static_cast<size_t>(count * size)));
  }
#if !defined(CUDART_VERSION)
  const int64_t groups = sim::counters().collective_groups;
#endif
  communicator.fuse([&] {
    for (size_t i = 0; i < counts.size(); ++i)
      communicator.all_gather(fulls[i].data(), shards[i].data(), counts[i], DType::kFp32, stream.get());
  });
#if !defined(CUDART_VERSION)
  EXPECT_EQ(sim::counters().collective_groups, groups + 1);
#endif
  stream.synchronize();
  for (size_t i = 0; i < counts.size(); ++i)
    expect_gathered(fulls[i].download(), {.first = 0, .stride = 1, .count = size}, counts[i]);
  EXPECT_EQ(communicator.traffic().all_gather_calls, 4);
  EXPECT_EQ(communicator.traffic().all_gather_bytes, (size - 1) * 741 * 4);
}

TEST(Fused, AnExceptionClosesTheGroup) {
  Communicator communicator(*job(), {.name = "reduce"});
  cuda::Stream stream;
  const DeviceArray<float> values({1});
  EXPECT_THROW(communicator.fuse([] { throw std::runtime_error("planted"); }), std::runtime_error);
  communicator.all_reduce(values.data(), 1, stream.get());  // would wait for a group's end for ever
  stream.synchronize();
  EXPECT_EQ(values.download()[0], static_cast<float>(job()->size()));
}

#if defined(MINILLM_NCCL_STAND_IN)
TEST(Fused, WhatOneWritesNoOtherMayTouch) {
  const int size = job()->size();
  Communicator communicator(*job(), {.name = "planted"});
  cuda::Stream stream;
  const DeviceArray<float> full(std::vector<float>(static_cast<size_t>(8 * size))), shard({1, 2, 3, 4});
  const auto gather = [&](int64_t offset, int64_t count) {
    communicator.all_gather(full.data() + offset, shard.data(), count, DType::kFp32, stream.get());
  };
  communicator.fuse([&] { gather(0, 4), gather(4 * size, 4); });
  const auto expect_conflict = [&](const std::function<void()>& calls) {
    try {
      communicator.fuse(calls);
      ADD_FAILURE() << "a conflict within a group was accepted";
    } catch (const CommunicationError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("ncclGroupEnd: ncclAll"), std::string::npos) << text;
      EXPECT_NE(text.find("of one group run at the same time"), std::string::npos) << text;
    }
  };
  expect_conflict([&] { gather(0, 4), gather(4 * size - 1, 4); });
  expect_conflict(
      [&] { gather(0, 4), communicator.all_reduce(full.data() + 4 * size - 1, 1, stream.get()); });
  expect_conflict([&] { communicator.all_reduce(shard.data() + 3, 1, stream.get()), gather(0, 4); });
  stream.synchronize();
  EXPECT_EQ(shard.download()[3], 4.0f) << "a refused group was issued in part";
}

TEST(Fused, AFailedCallFailsItsGroup) {
  const test::RawCommunicator comm;
  cuda::Stream stream;
  const DeviceArray<float> values({1});
  const auto reduce = [&](float* data, ncclRedOp_t operation) {
    return ncclAllReduce(data, data, 1, ncclFloat32, operation, comm.get(), stream.get());
  };
  ASSERT_EQ(ncclGroupStart(), ncclSuccess);
  EXPECT_EQ(reduce(values.data(), ncclSum), ncclSuccess);
  EXPECT_EQ(reduce(values.data(), ncclMax), ncclInvalidArgument);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
  stream.synchronize();
  EXPECT_EQ(values.download()[0], 1.0f);
  EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage) << "an end without a start";
}

TEST(Groups, AMismatchNamesRanksOfTheJobAndHarmsNoOtherGroup) {
  if (job()->size() != 4) GTEST_SKIP() << "for two groups of two ranks";
  const int rank = job()->rank();
  Communicator communicator(*job(), {.name = "planted", .group = shard_group(rank, 4, 2)});
  cuda::Stream stream;
  const DeviceArray<float> values({1, 1});
  communicator.all_reduce(values.data(), rank == 3 ? 2 : 1, stream.get());
  stream.synchronize();
  const std::string expected =
      rank < 2 ? ""
               : "invalid usage: communicator planted, collective #1: rank 2 calls ncclAllReduce of 1 fp32, "
                 "rank 3 calls ncclAllReduce of 2 fp32";
  EXPECT_EQ(communicator.asynchronous_error(), expected);
  EXPECT_EQ(values.download()[0] == 2.0f, rank < 2) << "the failed sum is NaN";
}
#endif

#if !defined(CUDART_VERSION)
TEST(Options, ReachNccl) {
  const Communicator gather(*job(), {.name = "gather", .zero_ctas = true});
  const Communicator reduce(*job(), {.name = "reduce", .max_ctas = 16});
  const auto configs = sim::counters().communicators;
  EXPECT_EQ(configs.at("gather").cta_policy, NCCL_CTA_POLICY_ZERO);
  EXPECT_EQ(configs.at("gather").max_ctas, NCCL_CONFIG_UNDEF_INT);
  EXPECT_EQ(configs.at("reduce").cta_policy, NCCL_CONFIG_UNDEF_INT);
  EXPECT_EQ(configs.at("reduce").max_ctas, 16);
  EXPECT_EQ(configs.at("reduce").blocking, 1);
  EXPECT_EQ(configs.at("reduce").ranks, job()->size());
  try {
    Communicator many(*job(), {.name = "many", .max_ctas = 65});
    ADD_FAILURE() << "65 CTAs were accepted";
  } catch (const CommunicationError& error) {
    const std::string text = error.what();
    EXPECT_NE(
        text.find("communicator many: ncclCommInitRankConfig: invalid argument: ncclCommInitRankConfig: "
                  "maxCTAs is 65; allowed: 1 to 64"),
        std::string::npos)
        << text;
  }
}
#endif

TEST(Options, LaunchOrderIsTheIssueOrderUnlessTheUserSaysOtherwise) {
  const char* const kVariable = "NCCL_LAUNCH_ORDER_IMPLICIT";
  setenv(kVariable, "0", 1);
  { const Communicator communicator(*job(), {.name = "first"}); }
  EXPECT_STREQ(std::getenv(kVariable), "0");
  unsetenv(kVariable);
  { const Communicator communicator(*job(), {.name = "second"}); }
  EXPECT_STREQ(std::getenv(kVariable), "1");
}

}  // namespace
}  // namespace minillm::comm

int main(int argc, char** argv) {
  return minillm::test::run_on_ranks(argc, argv);
}
