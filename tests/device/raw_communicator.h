// A communicator of NCCL's own interface, for what comm::Communicator does not offer.
#pragma once

#include <gtest/gtest.h>
#include <nccl.h>

#include <span>
#include <utility>

#include "ranks.h"

namespace minillm::test {

class RawCommunicator {
 public:
  /// Of all ranks of the job, with `rank` as this process's. Its id is made by rank 0 of the job.
  explicit RawCommunicator(int rank = job()->rank()) {
    ncclUniqueId id{};
    if (job()->rank() == 0) {
      EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    }
    job()->broadcast(std::as_writable_bytes(std::span(id.internal)));
    EXPECT_EQ(ncclCommInitRank(&comm_, job()->size(), id, rank), ncclSuccess) << ncclGetLastError(nullptr);
  }
  ~RawCommunicator() {
    if (!comm_) return;
    EXPECT_EQ(ncclCommDestroy(comm_), ncclSuccess) << ncclGetLastError(nullptr);
  }
  RawCommunicator(const RawCommunicator&) = delete;
  RawCommunicator& operator=(const RawCommunicator&) = delete;

  ncclComm_t get() const { return comm_; }
  /// For a test that destroys it itself.
  ncclComm_t release() { return std::exchange(comm_, nullptr); }

 private:
  ncclComm_t comm_ = nullptr;
};

}  // namespace minillm::test
