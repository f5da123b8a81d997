// Windows of the NCCL stand-in: each restriction that NCCL documents is planted as a fault and reported.
#include <gtest/gtest.h>
#include <nccl.h>

#include <cmath>
#include <cstring>

#include "ranks.h"
#include "raw_communicator.h"

namespace minillm::comm {
namespace {

using test::job;
using test::RawCommunicator;

constexpr size_t kBytes = 1 << 16;

bool is_last_rank() {
  return job()->rank() == job()->size() - 1;
}

void expect_text(const std::string& expected) {
  const std::string text = ncclGetLastError(nullptr);
  EXPECT_NE(text.find(expected), std::string::npos) << "rank " << job()->rank() << ": " << text;
}

class NcclMemory {
 public:
  NcclMemory() {
    void* data = nullptr;
    EXPECT_EQ(ncclMemAlloc(&data, kBytes), ncclSuccess) << ncclGetLastError(nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % NCCL_WIN_REQUIRED_ALIGNMENT, 0u);
    data_ = static_cast<std::byte*>(data);
  }
  ~NcclMemory() { EXPECT_EQ(ncclMemFree(data_), ncclSuccess) << ncclGetLastError(nullptr); }
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

class Windows : public ::testing::Test {
 protected:
  ncclResult_t add(void* begin, size_t bytes, int flags = NCCL_WIN_COLL_SYMMETRIC) {
    return ncclCommWindowRegister(comm.get(), begin, bytes, &window, flags);
  }
  void expect_removed() { EXPECT_EQ(ncclCommWindowDeregister(comm.get(), window), ncclSuccess); }

  NcclMemory memory;
  RawCommunicator comm;
  ncclWindow_t window = nullptr;
};

TEST_F(Windows, OfPartsOfAnAllocation) {
  EXPECT_EQ(add(memory.data() + 4096, kBytes - 4096), ncclSuccess) << ncclGetLastError(nullptr);
  const ncclWindow_t second = window;
  EXPECT_EQ(add(memory.data(), 4096, NCCL_WIN_DEFAULT), ncclSuccess) << ncclGetLastError(nullptr);
  expect_removed();
  EXPECT_EQ(ncclCommWindowDeregister(comm.get(), second), ncclSuccess);
  EXPECT_EQ(ncclCommWindowDeregister(comm.get(), second), ncclInvalidArgument) << "a window that is gone";
}

TEST_F(Windows, BeginAtPages) {
  void* small = nullptr;
  ASSERT_EQ(ncclMemAlloc(&small, 100), ncclSuccess);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small) % NCCL_WIN_REQUIRED_ALIGNMENT, 0u);
  EXPECT_EQ(ncclMemFree(small), ncclSuccess);
  EXPECT_EQ(add(memory.data() + 2048, 4096), ncclInvalidArgument);
  expect_text("begin at offset 2048 of their allocation, which has to be a multiple of 4096");
}

TEST_F(Windows, LieInMemoryOfNccl) {
  const cuda::DeviceMemory other(kBytes);
  for (const auto& [begin, bytes] : {std::pair{other.data(), kBytes}, {memory.data(), kBytes + 1}}) {
    EXPECT_EQ(add(begin, bytes), ncclInvalidArgument);
    expect_text(std::to_string(bytes) + " bytes are not within memory of one ncclMemAlloc");
  }
  EXPECT_EQ(add(nullptr, kBytes), ncclInvalidArgument);
  EXPECT_EQ(add(memory.data(), 0), ncclInvalidArgument);
  EXPECT_EQ(add(memory.data(), kBytes, 4), ncclInvalidArgument);
  EXPECT_EQ(ncclMemFree(other.data()), ncclInvalidArgument);
}

TEST_F(Windows, AreRegisteredOncePerCommunicator) {
  ASSERT_EQ(add(memory.data(), 8192), ncclSuccess);
  const ncclWindow_t first = window;
  EXPECT_EQ(add(memory.data() + 4096, 8192), ncclInvalidArgument);
  expect_text("8192 bytes overlap window 0: memory is registered once per communicator");
  const RawCommunicator second;
  EXPECT_EQ(ncclCommWindowRegister(second.get(), memory.data(), kBytes, &window, NCCL_WIN_COLL_SYMMETRIC),
            ncclSuccess);
  EXPECT_EQ(ncclCommWindowDeregister(comm.get(), window), ncclInvalidArgument) << "a window of another";
  EXPECT_EQ(ncclCommWindowDeregister(second.get(), window), ncclSuccess);
  EXPECT_EQ(ncclCommWindowDeregister(comm.get(), first), ncclSuccess);
}

TEST_F(Windows, HaveOneSizeOnAllRanks) {
  EXPECT_EQ(add(memory.data(), is_last_rank() ? 8192 : 4096), ncclInvalidArgument);
  expect_text("rank 0 registers a window of 4096 bytes with flags 1, rank " +
              std::to_string(job()->size() - 1) + " one of 8192 bytes with flags 1");
  EXPECT_EQ(add(memory.data(), 4096, is_last_rank() ? NCCL_WIN_DEFAULT : NCCL_WIN_COLL_SYMMETRIC),
            ncclInvalidArgument);
  expect_text("one of 4096 bytes with flags 0");
}

TEST_F(Windows, ThatAreRefusedLeaveNothingBehind) {
  EXPECT_EQ(add(memory.data() + 1, 4096), ncclInvalidArgument);
  EXPECT_EQ(add(memory.data(), 4096), ncclSuccess) << ncclGetLastError(nullptr);
  expect_removed();
}

TEST_F(Windows, HoldTheirMemory) {
  ASSERT_EQ(add(memory.data(), kBytes), ncclSuccess);
  EXPECT_EQ(ncclMemFree(memory.data()), ncclInvalidUsage);
  expect_text("ncclMemFree: 65536 bytes are still registered with communicator #");
  expect_removed();
}

TEST_F(Windows, AreRemovedBeforeTheirCommunicator) {
  ASSERT_EQ(add(memory.data(), kBytes), ncclSuccess);
  EXPECT_EQ(ncclCommDestroy(comm.release()), ncclInvalidUsage);
  expect_text("still has 1 windows: ncclCommWindowDeregister has to come first");
}

/// Collectives in a window of the whole memory. What they move does not matter here.
class SymmetricWindow : public Windows {
 protected:
  SymmetricWindow() { EXPECT_EQ(add(memory.data(), kBytes), ncclSuccess); }
  ~SymmetricWindow() override { expect_removed(); }

  float* at(int64_t offset) const { return reinterpret_cast<float*>(memory.data() + offset); }
  ncclResult_t gather(const float* shard, float* full, size_t count = 16) {
    return ncclAllGather(shard, full, count, ncclFloat32, comm.get(), stream.get());
  }
  ncclResult_t scatter(const float* full, float* shard) {
    return ncclReduceScatter(full, shard, 16, ncclFloat32, ncclSum, comm.get(), stream.get());
  }
  std::string error() {
    stream.synchronize();
    ncclResult_t code = ncclSuccess;
    EXPECT_EQ(ncclCommGetAsyncError(comm.get(), &code), ncclSuccess);
    return code == ncclSuccess ? "" : ncclGetLastError(comm.get());
  }
  void expect_error(const std::string& first, const std::string& last) {
    const std::string text = error();
    EXPECT_NE(text.find("collective #1: rank 0 calls " + first), std::string::npos) << text;
    EXPECT_NE(text.find("rank " + std::to_string(job()->size() - 1) + " calls " + last), std::string::npos)
        << text;
    EXPECT_TRUE(text.ends_with("; buffers in symmetric windows need the same offsets on all ranks")) << text;
  }

  cuda::Stream stream;
};

TEST_F(SymmetricWindow, SameOffsetsAreFine) {
  const int64_t piece = job()->rank() * 16 * 4;
  const test::DeviceArray<float> outside(std::vector<float>(16, 1));
  EXPECT_EQ(gather(at(8192), at(0)), ncclSuccess);
  EXPECT_EQ(gather(at(piece), at(0)), ncclSuccess) << "in place";
  EXPECT_EQ(gather(outside.data(), at(0)), ncclSuccess);
  EXPECT_EQ(scatter(at(0), at(8192)), ncclSuccess);
  EXPECT_EQ(scatter(at(4096), at(4096 + piece)), ncclSuccess) << "in place";
  EXPECT_EQ(gather(at(is_last_rank() ? 0 : 256), at(0), 0), ncclSuccess) << "nothing is moved";
  EXPECT_EQ(error(), "");
}

TEST_F(SymmetricWindow, AnOffsetThatDiffersIsNamed) {
  EXPECT_EQ(gather(at(8192), at(is_last_rank() ? 512 : 256)), ncclSuccess);
  expect_error("ncclAllGather of 16 fp32 from window 0 offset 8192 to window 0 offset 256,",
               "ncclAllGather of 16 fp32 from window 0 offset 8192 to window 0 offset 512");
}

TEST_F(SymmetricWindow, AnInputThatDiffersIsNamed) {
  EXPECT_EQ(scatter(at(is_last_rank() ? 4096 : 0), at(8192)), ncclSuccess);
  expect_error("ncclReduceScatter of 16 fp32 from window 0 offset 0 to window 0 offset 8192",
               "ncclReduceScatter of 16 fp32 from window 0 offset 4096 to window 0 offset 8192");
}

TEST_F(SymmetricWindow, ABufferOutsideOnOneRankIsNamed) {
  const test::DeviceArray<float> outside(std::vector<float>(16, 1));
  EXPECT_EQ(gather(is_last_rank() ? outside.data() : at(8192), at(0)), ncclSuccess);
  expect_error("ncclAllGather of 16 fp32 from window 0 offset 8192 to",
               "ncclAllGather of 16 fp32 from outside of windows to window 0 offset 0");
}

TEST_F(SymmetricWindow, ABufferThatLeavesItIsRefused) {
  EXPECT_EQ(gather(at(0), at(kBytes - 64)), ncclInvalidArgument);
  expect_text("at offset 65472 leaves window 0 of 65536 bytes");
  EXPECT_EQ(error(), "");
}

}  // namespace
}  // namespace minillm::comm

int main(int argc, char** argv) {
  return minillm::test::run_on_ranks(argc, argv);
}
