#include "sim/nccl_transport.h"

#if defined(MINILLM_WITH_MPI)
#define OMPI_SKIP_MPICXX 1  // the C++ bindings that MPI dropped in 2012 do not compile without warnings
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <sched.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace nccl_over_mpi {
namespace {

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Failure(ncclSystemError, std::string(call) + ": " + std::string(text, length));
}

MPI_Datatype type_of(int64_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return MPI_UINT8_T;
    case 2:
      return MPI_UINT16_T;
    case 4:
      return MPI_UINT32_T;
    default:
      return MPI_UINT64_T;
  }
}

class MpiTransport final : public Transport {
 public:
  MpiTransport(int nranks, int rank, const ncclUniqueId& id) : size_(nranks) {
    require_world(nranks, rank);
    check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    std::vector<ncclUniqueId> ids(nranks);
    all_gather(&id, ids.data(), sizeof id, 1);
    for (int r = 1; r < nranks; ++r)
      if (std::memcmp(&ids[r], &ids[0], sizeof id) != 0)
        throw Failure(
            ncclInvalidArgument,
            "rank " + std::to_string(r) +
                " holds another unique id than rank 0: the id comes from rank 0 by broadcast, and all "
                "ranks create their communicators in the same order");
  }

  ~MpiTransport() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // After an abort requests may be pending, and the other ranks may not come here.
    if (!finalized && !aborted_ && comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }

  void all_gather(const void* piece, void* all, int64_t count, int64_t element_bytes) override {
    const MPI_Datatype type = type_of(element_bytes);
    const int n = static_cast<int>(count);
    MPI_Request request;
    check(MPI_Iallgather(piece, n, type, all, n, type, comm_, &request), "MPI_Iallgather");
    complete(request, "MPI_Iallgather");
  }

  void all_to_all(const void* sent, void* received, int64_t count, int64_t element_bytes) override {
    const MPI_Datatype type = type_of(element_bytes);
    const int n = static_cast<int>(count);
    MPI_Request request;
    check(MPI_Ialltoall(sent, n, type, received, n, type, comm_, &request), "MPI_Ialltoall");
    complete(request, "MPI_Ialltoall");
  }

  void broadcast(void* data, int64_t count, int64_t element_bytes, int root) override {
    MPI_Request request;
    check(MPI_Ibcast(data, static_cast<int>(count), type_of(element_bytes), root, comm_, &request),
          "MPI_Ibcast");
    complete(request, "MPI_Ibcast");
  }

  void abort() override { aborted_ = true; }

 private:
  static void require_world(int nranks, int rank) {
    int initialized = 0, level = 0, world_size = 0, world_rank = 0;
    MPI_Initialized(&initialized);
    if (!initialized) throw Failure(ncclInvalidUsage, "MPI was not started: call MPI_Init_thread first");
    MPI_Query_thread(&level);
    if (level != MPI_THREAD_MULTIPLE)
      throw Failure(ncclInvalidUsage, "MPI was started without MPI_THREAD_MULTIPLE");
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    if (world_size != nranks || world_rank != rank)
      throw Failure(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(nranks) +
                                             " is rank " + std::to_string(world_rank) + " of " +
                                             std::to_string(world_size) +
                                             " to MPI: both have to be the same");
  }

  void complete(MPI_Request& request, const char* call) {
    constexpr int kYields = 200;
    for (int polls = 0;; ++polls) {
      int done = 0;
      check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call);
      if (done) return;
      if (aborted_) throw Failure(ncclInternalError, std::string(call) + ": the communicator was aborted");
      if (polls < kYields)
        sched_yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  MPI_Comm comm_ = MPI_COMM_NULL;
  int64_t size_;
  std::atomic<bool> aborted_{false};
};

}  // namespace

std::unique_ptr<Transport> make_transport(int nranks, int rank, const ncclUniqueId& id) {
  return std::make_unique<MpiTransport>(nranks, rank, id);
}

}  // namespace nccl_over_mpi

#else

namespace nccl_over_mpi {

std::unique_ptr<Transport> make_transport(int nranks, int, const ncclUniqueId&) {
  throw Failure(ncclInvalidUsage,
                "a communicator of " + std::to_string(nranks) +
                    " ranks needs MPI, which this program was built without: configure it with "
                    "MINILLM_MPI=ON");
}

}  // namespace nccl_over_mpi

#endif
