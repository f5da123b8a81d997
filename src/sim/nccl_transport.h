// How the NCCL stand-in moves bytes between ranks: MPI collectives, polled.
//
// Polled, because a host function that blocks inside MPI could not be aborted and would keep other threads of
// this process from making progress on a machine with few cores.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

namespace nccl_over_mpi {

/// What a collective fails with: the code and text that the communicator reports.
class Failure : public std::runtime_error {
 public:
  Failure(ncclResult_t code, const std::string& text) : std::runtime_error(text), code_(code) {}
  ncclResult_t code() const { return code_; }

 private:
  ncclResult_t code_;
};

/// One per communicator; used by one thread at a time, apart from abort(). Buffers are host memory. `count`
/// counts elements of `element_bytes` (1, 2, 4 or 8) and is below 2^31.
class Transport {
 public:
  virtual ~Transport() = default;
  /// The ranks of MPI_COMM_WORLD that take part, in the communicator's rank order.
  virtual std::span<const int> world_ranks() const = 0;
  /// all[size * count] = the pieces [count] of all ranks in rank order.
  virtual void all_gather(const void* piece, void* all, int64_t count, int64_t element_bytes) = 0;
  /// received[r * count ...] = what rank r had at sent[rank * count ...].
  virtual void all_to_all(const void* sent, void* received, int64_t count, int64_t element_bytes) = 0;
  virtual void broadcast(void* data, int64_t count, int64_t element_bytes, int root) = 0;
  /// Makes running and later transfers fail. Callable from any thread.
  virtual void abort() = 0;
};

/// Collective over all ranks of MPI_COMM_WORLD: those who hold the same `id` are connected. Throws Failure
/// when MPI was not started, is not MPI_THREAD_MULTIPLE, or the holders of `id` are not the ranks 0 to
/// nranks - 1; and without MPI in the build.
std::unique_ptr<Transport> make_transport(int nranks, int rank, const ncclUniqueId& id);

}  // namespace nccl_over_mpi
