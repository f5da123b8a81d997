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
  MpiTransport(int nranks, int rank, const ncclUniqueId& id) {
    require_threads();
    const Member self{nranks, rank, rank_of(MPI_COMM_WORLD), id};
    check(MPI_Comm_split(MPI_COMM_WORLD, colour_of(id), rank, &comm_), "MPI_Comm_split");
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    int size = 0;
    check(MPI_Comm_size(comm_, &size), "MPI_Comm_size");
    std::vector<Member> members(size);
    all_gather(&self, members.data(), sizeof(Member), 1);
    for (const Member& member : members) world_ranks_.push_back(member.world_rank);
    // All members find the same fault, so none is left waiting for those who threw.
    if (const std::string fault = fault_of(members); !fault.empty()) {
      MPI_Comm_free(&comm_);
      throw Failure(ncclInvalidArgument, fault);
    }
  }

  ~MpiTransport() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // After an abort requests may be pending, and the other ranks may not come here.
    if (!finalized && !aborted_ && comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }

  std::span<const int> world_ranks() const override { return world_ranks_; }

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
  /// Sent between processes as bytes.
  struct Member {
    int nranks, rank, world_rank;
    ncclUniqueId id;
  };

  static void require_threads() {
    int initialized = 0, level = 0;
    MPI_Initialized(&initialized);
    if (!initialized) throw Failure(ncclInvalidUsage, "MPI was not started: call MPI_Init_thread first");
    MPI_Query_thread(&level);
    if (level != MPI_THREAD_MULTIPLE)
      throw Failure(ncclInvalidUsage, "MPI was started without MPI_THREAD_MULTIPLE");
  }

  static int rank_of(MPI_Comm comm) {
    int rank = 0;
    check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
    return rank;
  }

  /// Different ids may share a colour; fault_of() compares the ids themselves.
  static int colour_of(const ncclUniqueId& id) {
    unsigned bits;
    std::memcpy(&bits, id.internal, sizeof bits);
    return static_cast<int>(bits & 0x7fffffffu);
  }

  /// Why `members`, whom MPI brought together, are no communicator; an empty string if they are one.
  static std::string fault_of(std::span<const Member> members) {
    const int size = static_cast<int>(members.size());
    for (int i = 0; i < size; ++i) {
      const Member& member = members[i];
      const std::string name = "MPI's rank " + std::to_string(member.world_rank);
      if (std::memcmp(&member.id, &members[0].id, sizeof member.id) != 0)
        return name + " holds another unique id than MPI's rank " + std::to_string(members[0].world_rank);
      if (member.nranks != size)
        return name + " is to be one of " + std::to_string(member.nranks) +
               ", but the ranks that hold its unique id are " + std::to_string(size) +
               ": the id comes from one of them, and all ranks of MPI create their communicators in the same "
               "order";
      if (member.rank != i)
        return name + " is to be rank " + std::to_string(member.rank) + " where rank " + std::to_string(i) +
               " is missing: the ranks are 0 to " + std::to_string(size - 1) + ", each once";
    }
    return "";
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
  std::vector<int> world_ranks_;
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
