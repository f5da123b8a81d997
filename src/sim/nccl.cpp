// The NCCL stand-in's interface: validation, and failures as result codes with a text.
#include <nccl.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <random>
#include <string>

#include "sim/nccl_call.h"
#include "sim/nccl_communicator.h"
#include "sim/nccl_reduce.h"
#if !defined(CUDART_VERSION)  // the simulated device
#include "sim/counters.h"
#endif

using nccl_over_mpi::Call;
using nccl_over_mpi::Collective;
using nccl_over_mpi::Failure;

namespace {

thread_local std::string last_error;
thread_local int group_depth = 0;

/// Runs `body` and turns what it throws into a result with a text for ncclGetLastError.
template <class Body>
ncclResult_t guarded(Body body) {
  try {
    body();
    return ncclSuccess;
  } catch (const Failure& failure) {
    last_error = failure.what();
    return failure.code();
  } catch (const std::exception& error) {
    last_error = error.what();
    return ncclSystemError;
  }
}

void require(bool condition, ncclResult_t code, const std::string& text) {
  if (!condition) throw Failure(code, text);
}

void require(bool condition, const std::string& text) {
  require(condition, ncclInvalidArgument, text);
}

void count_for_tests(const Call& call, int64_t bytes) {
#if !defined(CUDART_VERSION)
  sim::count_collective(nccl_over_mpi::name_of(call.collective), bytes);
#else
  (void)call, (void)bytes;
#endif
}

struct Arguments {
  const void* send;
  void* receive;
  size_t count;
  ncclDataType_t type;
  int root = 0;
  ncclRedOp_t operation = ncclSum;
};

ncclResult_t issue(Collective collective, const Arguments& a, ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    const std::string name = nccl_over_mpi::name_of(collective);
    require(comm != nullptr, name + ": the communicator is null");
    require(nccl_over_mpi::name_of(a.type) != nullptr,
            name + ": unknown data type " + std::to_string(a.type));
    require(a.count <= INT_MAX,
            name + ": " + std::to_string(a.count) + " elements; at most 2147483647 are supported");
    require(a.root >= 0 && a.root < comm->size(),
            name + ": root " + std::to_string(a.root) + " is not a rank");
    const bool reads = collective != Collective::kBroadcast || a.root == comm->rank();
    require(a.count == 0 || ((a.send || !reads) && a.receive), name + ": a buffer is null");
    if (collective == Collective::kReduceScatter || collective == Collective::kAllReduce) {
      require(a.operation == ncclSum, name + ": only ncclSum is supported");
      require(nccl_over_mpi::can_sum(a.type),
              name + ": sums exist for fp32 and bf16, not for " + nccl_over_mpi::name_of(a.type));
    }
    Call call;
    call.count = static_cast<int64_t>(a.count);
    call.collective = collective;
    call.type = a.type;
    call.root = a.root;
    comm->issue(call, a.send, a.receive, stream);
    count_for_tests(call, call.count * nccl_over_mpi::size_of(a.type));
  });
}

std::string default_name() {
  static std::atomic<int> created{0};
  std::string name = "#";
  return name += std::to_string(created++);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  return guarded([&] {
    require(version != nullptr, "ncclGetVersion: the pointer is null");
    *version = NCCL_VERSION_CODE;
  });
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded([&] {
    require(id != nullptr, "ncclGetUniqueId: the pointer is null");
    std::random_device random;
    for (size_t i = 0; i < sizeof id->internal; i += sizeof(unsigned)) {
      const unsigned word = random();
      std::memcpy(id->internal + i, &word, sizeof word);
    }
  });
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t comm) {
  if (comm && comm->asynchronous_error() != ncclSuccess) return comm->error_text();
  return last_error.c_str();
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return guarded([&] {
    require(comm != nullptr, "ncclCommInitRank: the pointer is null");
    require(nranks > 0 && rank >= 0 && rank < nranks, "ncclCommInitRank: rank " + std::to_string(rank) +
                                                          " of " + std::to_string(nranks) +
                                                          " does not exist");
    if (config)
      require(config->size == sizeof(ncclConfig_t) && config->magic == 0xcafebeef,
              "ncclCommInitRankConfig: the config was not set to NCCL_CONFIG_INITIALIZER");
    *comm = new ncclComm(config && config->commName ? config->commName : default_name(), nranks, rank, id);
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, nranks, id, rank, nullptr);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return guarded([&] {
    require(comm != nullptr, "ncclCommFinalize: the communicator is null");
    comm->wait();
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return guarded([&] {
    require(comm != nullptr, "ncclCommDestroy: the communicator is null");
    const std::unique_ptr<ncclComm> owner(comm);
    comm->wait();
  });
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return guarded([&] {
    require(comm != nullptr, "ncclCommAbort: the communicator is null");
    const std::unique_ptr<ncclComm> owner(comm);
    comm->abort();
    comm->wait();
  });
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return guarded([&] {
    require(comm && error, "ncclCommGetAsyncError: a pointer is null");
    *error = comm->asynchronous_error();
  });
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return guarded([&] {
    require(comm && count, "ncclCommCount: a pointer is null");
    *count = comm->size();
  });
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return guarded([&] {
    require(comm && rank, "ncclCommUserRank: a pointer is null");
    *rank = comm->rank();
  });
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue(Collective::kAllGather, {send, receive, count, type}, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return issue(Collective::kReduceScatter, {send, receive, count, type, 0, operation}, comm, stream);
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return issue(Collective::kAllReduce, {send, receive, count, type, 0, operation}, comm, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue(Collective::kBroadcast, {send, receive, count, type, root}, comm, stream);
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  return guarded([] {
    require(group_depth > 0, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    --group_depth;
  });
}

}  // extern "C"
