// Ranks that call different collectives get an error that says what each called, on every rank, and do not
// hang.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <span>

#include "core/error.h"
#include "ranks.h"

namespace minillm::comm {
namespace {

using test::DeviceArray;
using test::job;

constexpr int64_t kRoom = 4096;

/// Runs `calls` on this rank and expects the asynchronous error `expected` on the communicator named
/// "planted"; then the next call must throw it.
void expect_mismatch(const std::function<void(Communicator&, float*, cudaStream_t)>& calls,
                     const std::string& expected) {
  Communicator communicator(*job(), {.name = "planted"});
  cuda::Stream stream;
  const DeviceArray<float> memory(std::vector<float>(kRoom, 1));
  try {
    calls(communicator, memory.data(), stream.get());
  } catch (const CommunicationError&) {
    // The first call may have failed before the second was issued.
  }
  stream.synchronize();
  const std::string error = communicator.asynchronous_error();
  EXPECT_NE(error.find(expected), std::string::npos) << "rank " << job()->rank() << ": " << error;
  EXPECT_TRUE(std::isnan(memory.download()[0])) << "a failed collective's result looks valid";
  try {
    communicator.all_reduce(memory.data(), 1, stream.get());
    ADD_FAILURE() << "a collective after the error was accepted";
  } catch (const CommunicationError& later) {
    const std::string text = later.what();
    EXPECT_NE(text.find("communicator planted: ncclAllReduce of 1 fp32: "), std::string::npos) << text;
    EXPECT_NE(text.find(expected), std::string::npos) << text;
  }
}

bool is_last_rank() {
  return job()->rank() == job()->size() - 1;
}

std::string last_rank_calls(const char* call) {
  return "rank " + std::to_string(job()->size() - 1) + " calls " + call;
}

TEST(Mismatch, OfOrder) {
  expect_mismatch(
      [](Communicator& c, float* memory, cudaStream_t stream) {
        if (is_last_rank()) {
          c.reduce_scatter(memory, memory + kRoom / 2, 64, DType::kFp32, stream);
          c.all_gather(memory, memory + kRoom / 2, 128, DType::kBf16, stream);
        } else {
          c.all_gather(memory, memory + kRoom / 2, 128, DType::kBf16, stream);
          c.reduce_scatter(memory, memory + kRoom / 2, 64, DType::kFp32, stream);
        }
      },
      "communicator planted, collective #1: rank 0 calls ncclAllGather of 128 bf16, ");
}

TEST(Mismatch, NamesTheOtherRank) {
  expect_mismatch(
      [](Communicator& c, float* memory, cudaStream_t stream) {
        if (is_last_rank())
          c.reduce_scatter(memory, memory + kRoom / 2, 64, DType::kFp32, stream);
        else
          c.all_gather(memory, memory + kRoom / 2, 128, DType::kBf16, stream);
      },
      last_rank_calls("ncclReduceScatter of 64 fp32"));
}

TEST(Mismatch, OfSizeAfterGoodCollectives) {
  expect_mismatch(
      [](Communicator& c, float* memory, cudaStream_t stream) {
        for (int i = 0; i < 4; ++i) c.all_reduce(memory, 100, stream);
        c.all_reduce(memory, is_last_rank() ? 101 : 100, stream);
      },
      "communicator planted, collective #5: rank 0 calls ncclAllReduce of 100 fp32, ");
}

TEST(Mismatch, OfType) {
  expect_mismatch(
      [](Communicator& c, float* memory, cudaStream_t stream) {
        c.all_gather(memory, memory + kRoom / 2, 64, is_last_rank() ? DType::kFp32 : DType::kBf16, stream);
      },
      last_rank_calls("ncclAllGather of 64 fp32"));
}

TEST(Mismatch, LeavesOtherCommunicatorsUsable) {
  Communicator good(*job(), {.name = "good"});
  cuda::Stream stream;
  const DeviceArray<float> values({1});
  expect_mismatch(
      [](Communicator& c, float* memory, cudaStream_t s) { c.all_reduce(memory, is_last_rank() ? 2 : 1, s); },
      last_rank_calls("ncclAllReduce of 2 fp32"));
  good.all_reduce(values.data(), 1, stream.get());
  stream.synchronize();
  EXPECT_EQ(values.download()[0], static_cast<float>(job()->size()));
  EXPECT_EQ(good.asynchronous_error(), "");
}

TEST(Mismatch, OfUniqueId) {
  ncclUniqueId id{};
  ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);  // each rank its own
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRank(&comm, job()->size(), id, job()->rank()), ncclInvalidArgument);
  const std::string text = ncclGetLastError(nullptr);
  const std::string who = "rank " + std::to_string(job()->rank()) + " is to be one of ";
  EXPECT_NE(text.find(who + std::to_string(job()->size()) + ", but the ranks that hold its unique id are 1"),
            std::string::npos)
      << text;
}

/// Rank 0's id on all ranks.
ncclUniqueId common_id() {
  ncclUniqueId id{};
  EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
  job()->broadcast(std::as_writable_bytes(std::span(id.internal)));
  return id;
}

void expect_no_communicator(const ncclUniqueId& id, int rank, const std::string& expected) {
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRank(&comm, job()->size(), id, rank), ncclInvalidArgument);
  const std::string text = ncclGetLastError(nullptr);
  EXPECT_NE(text.find(expected), std::string::npos) << text;
}

TEST(Mismatch, OfPartOfTheUniqueId) {
  ncclUniqueId id = common_id();
  if (is_last_rank()) ++id.internal[NCCL_UNIQUE_ID_BYTES - 1];
  const std::string last = std::to_string(job()->size() - 1);
  expect_no_communicator(id, job()->rank(),
                         "MPI's rank " + last + " holds another unique id than MPI's rank 0");
}

TEST(Mismatch, OfRanks) {
  expect_no_communicator(common_id(), 0, "MPI's rank 1 is to be rank 0 where rank 1 is missing");
}

TEST(Mismatch, OfWorldSize) {
  ncclUniqueId id{};
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRank(&comm, job()->size() + 1, id, job()->rank()), ncclInvalidArgument);
  EXPECT_EQ(ncclCommInitRank(&comm, job()->size(), id, job()->size()), ncclInvalidArgument);
}

}  // namespace
}  // namespace minillm::comm

int main(int argc, char** argv) {
  return minillm::test::run_on_ranks(argc, argv);
}
