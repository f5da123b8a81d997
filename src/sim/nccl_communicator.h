// A communicator of the NCCL stand-in: collectives as operations of a stream, in CUDA runtime calls only.
//
// One collective is three operations: a copy to pinned staging memory, a host function in which the ranks
// first compare what they call and then exchange and add, and a copy back. Everything that the host function
// needs lives in the communicator until it is destroyed, so captured graphs may replay it.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/nccl_call.h"
#include "sim/nccl_issue_order.h"
#include "sim/nccl_transport.h"
#include "sim/nccl_window.h"

struct ncclComm {
 public:
  /// Throws Failure. Collective when nranks > 1.
  ncclComm(std::string name, int nranks, int rank, const ncclUniqueId& id);
  ~ncclComm();
  ncclComm(const ncclComm&) = delete;
  ncclComm& operator=(const ncclComm&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }

  /// Collective, and blocks until all ranks are there: also where one was refused and never comes, as in
  /// NCCL, which looks at the buffer before it exchanges anything. Throws Failure.
  ncclWindow_t register_window(const void* buffer, int64_t bytes, int flags);
  /// Waits for nobody.
  void deregister_window(ncclWindow_t window) { windows_.remove(window); }
  size_t windows() const { return windows_.size(); }

  /// `call` with the places of its buffers in windows. Throws Failure when a buffer leaves its window.
  nccl_over_mpi::Call placed(nccl_over_mpi::Call call, const void* send, const void* receive) const;
  /// Puts the collective on the stream. Throws Failure: a CUDA error, or the communicator's asynchronous
  /// error.
  void issue(const nccl_over_mpi::Call& call, const void* send, void* receive, cudaStream_t stream);
  /// Waits for everything issued.
  void wait();
  /// Waits until all ranks are here, unless a collective failed: NCCL's communicators have a thread that
  /// serves other ranks, and are destroyed when those have said goodbye.
  void wait_for_peers();
  void abort();

  ncclResult_t asynchronous_error() const;
  /// For when there is an asynchronous error.
  const char* error_text() const;

 private:
  /// A call with its staging memory: the argument of the host function, shared by equal calls.
  struct Operation {
    ncclComm* communicator;
    nccl_over_mpi::Call call;
    std::byte* send;
    std::byte* receive;
    std::byte* result;  ///< what is copied back: send or receive
  };

  void copy_for_one_rank(const nccl_over_mpi::Call& call, const void* send, void* receive,
                         cudaStream_t stream);
  Operation& operation_for(const nccl_over_mpi::Call& call);
  void grow_staging(int64_t bytes);
  static void run(void* operation);
  void compare_calls(nccl_over_mpi::Call call);
  void move_data(const Operation& operation);
  std::string registration_fault(int64_t bytes, int flags);
  void require_no_error() const;
  void fail(ncclResult_t code, const std::string& text);

  const std::string name_;
  const int rank_;
  const int size_;
  std::unique_ptr<nccl_over_mpi::Transport> transport_;  ///< null for one rank
  int64_t sequence_ = 0;                                 ///< of the host functions, which run one at a time

  struct FreePinned {
    void operator()(std::byte* data) const { cudaFreeHost(data); }
  };
  struct FreeDevice {
    void operator()(std::byte* data) const { cudaFree(data); }
  };
  std::unique_ptr<std::byte, FreeDevice> buffers_;  ///< what NCCL keeps for itself: never touched
  std::vector<std::unique_ptr<std::byte, FreePinned>>
      staging_;  ///< pairs; the last one is in use, all stay valid
  int64_t staging_bytes_ = 0;
  std::map<nccl_over_mpi::Call, std::unique_ptr<Operation>> operations_;
  nccl_over_mpi::IssueOrder order_;
  nccl_over_mpi::Windows windows_;

  // Read without synchronisation while there is no error: a lock here would order streams that nothing else
  // orders, and hide their races from ThreadSanitizer.
  std::atomic<ncclResult_t> error_{ncclSuccess};
  std::string error_text_;  ///< written once, before error_
};
