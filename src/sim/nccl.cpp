// The NCCL stand-in's interface: validation, and failures as result codes with a text.
#include <nccl.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "sim/nccl_call.h"
#include "sim/nccl_communicator.h"
#include "sim/nccl_group.h"
#include "sim/nccl_reduce.h"
#if !defined(CUDART_VERSION)  // the simulated device
#include "sim/control.h"
#include "sim/counters.h"
#include "sim/device.h"
#endif

using nccl_over_mpi::Call;
using nccl_over_mpi::Collective;
using nccl_over_mpi::Failure;
using nccl_over_mpi::Issue;

namespace {

thread_local std::string last_error;
thread_local nccl_over_mpi::Group group;

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

#if defined(CUDART_VERSION)
void count_for_tests(const Call&, cudaStream_t) {}
void count_group_for_tests() {}
void record_for_tests(const ncclComm&, const ncclConfig_t&) {}
void count_window_for_tests(const ncclComm&) {}
int reported_version() {
  return NCCL_VERSION(2, 31, 2);
}
#else
void count_window_for_tests(const ncclComm& comm) {
  sim::count_window(comm.name());
}
int reported_version() {
  return sim::settings().nccl_version;
}
void count_for_tests(const Call& call, cudaStream_t stream) {
  const int64_t bytes = call.count * nccl_over_mpi::size_of(static_cast<ncclDataType_t>(call.type));
  const char* name = nccl_over_mpi::name_of(call.collective);
  sim::device().scheduler.at_launch(stream, [=] { sim::count_collective(name, bytes); });
}
void count_group_for_tests() {
  sim::count_collective_group();
}
void record_for_tests(const ncclComm& comm, const ncclConfig_t& config) {
  sim::record_communicator(comm.name(), {comm.size(), config.blocking, config.maxCTAs, config.CTAPolicy});
}
#endif

struct Arguments {
  const void* send;
  void* receive;
  size_t count;
  ncclDataType_t type;
  int root = 0;
  ncclRedOp_t operation = ncclSum;
};

/// What the arguments ask for. Throws Failure for those that are not allowed.
Call make_call(Collective collective, const Arguments& a, ncclComm_t comm) {
  const std::string name = nccl_over_mpi::name_of(collective);
  require(comm != nullptr, name + ": the communicator is null");
  require(nccl_over_mpi::name_of(a.type) != nullptr, name + ": unknown data type " + std::to_string(a.type));
  require(a.count <= INT_MAX,
          name + ": " + std::to_string(a.count) + " elements; at most 2147483647 are supported");
  require(a.root >= 0 && a.root < comm->size(), name + ": root " + std::to_string(a.root) + " is not a rank");
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
  return comm->placed(call, a.send, a.receive);
}

void issue_now(const Issue& issue) {
  issue.communicator->issue(issue.call, issue.send, issue.receive, issue.stream);
  count_for_tests(issue.call, issue.stream);
}

ncclResult_t issue(Collective collective, const Arguments& a, ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    try {
      const Issue issue{comm, make_call(collective, a, comm), a.send, a.receive, stream};
      group.open() ? group.add(issue) : issue_now(issue);
    } catch (const Failure& failure) {
      if (group.open()) group.fail(failure);
      throw;
    }
  });
}

void require_valid(const ncclConfig_t& config) {
  const auto require_range = [](const char* field, int value, int lowest, int highest) {
    require(value == NCCL_CONFIG_UNDEF_INT || (value >= lowest && value <= highest),
            std::string("ncclCommInitRankConfig: ") + field + " is " + std::to_string(value) +
                "; allowed: " + std::to_string(lowest) + " to " + std::to_string(highest));
  };
  require(config.size == sizeof(ncclConfig_t) && config.magic == 0xcafebeef,
          "ncclCommInitRankConfig: the config was not set to NCCL_CONFIG_INITIALIZER");
  require_range("blocking", config.blocking, 1, 1);  // calls that return early do not exist here
  require_range("maxCTAs", config.maxCTAs, 1, 64);
  require_range("CTAPolicy", config.CTAPolicy, NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_ZERO);
}

std::string default_name() {
  static std::atomic<int> created{0};
  std::string name = "#";
  return name += std::to_string(created++);
}

}  // namespace

extern "C" {

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return guarded([&] {
    require(pointer != nullptr && bytes > 0, "ncclMemAlloc: the pointer is null or the size 0");
    *pointer = nccl_over_mpi::allocate_memory(static_cast<int64_t>(bytes));
  });
}

ncclResult_t ncclMemFree(void* pointer) {
  return guarded([&] {
    if (pointer) nccl_over_mpi::free_memory(pointer);
  });
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t bytes, ncclWindow_t* window,
                                    int flags) {
  return guarded([&] {
    require(comm && window, "ncclCommWindowRegister: a pointer is null");
    *window = comm->register_window(buffer, static_cast<int64_t>(bytes), flags);
    count_window_for_tests(*comm);
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  return guarded([&] {
    require(comm != nullptr, "ncclCommWindowDeregister: the communicator is null");
    comm->deregister_window(window);
  });
}

ncclResult_t ncclGetVersion(int* version) {
  return guarded([&] {
    require(version != nullptr, "ncclGetVersion: the pointer is null");
    *version = reported_version();
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
    ncclConfig_t defaults = NCCL_CONFIG_INITIALIZER;
    if (!config) config = &defaults;
    require_valid(*config);
    *comm = new ncclComm(config->commName ? config->commName : default_name(), nranks, rank, id);
    record_for_tests(**comm, *config);
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
    comm->wait_for_peers();
    require(comm->windows() == 0, ncclInvalidUsage,
            "ncclCommDestroy: communicator " + comm->name() + " still has " +
                std::to_string(comm->windows()) + " windows: ncclCommWindowDeregister has to come first");
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
  group.start();
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  return guarded([] {
    for (const Issue& issue : group.end()) issue_now(issue);
    if (!group.open()) count_group_for_tests();
  });
}

}  // extern "C"
