#include "comm/communicator.h"

#include <cstdlib>
#include <vector>

#include "comm/introduction.h"
#include "core/checked.h"
#include "core/error.h"
#include "cuda/check.h"

static_assert(NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0), "minillm needs NCCL 2.28 or later");

namespace minillm::comm {
namespace {

ncclDataType_t nccl_type(DType type) {
  return type == DType::kFp32 ? ncclFloat32 : ncclBfloat16;
}

std::string describe_call(const char* call, int64_t count, DType type) {
  return std::string(call) + " of " + std::to_string(count) + " " + std::string(name_of(type));
}

void check(ncclResult_t result, const std::string& name, const std::string& call, ncclComm_t comm) {
  if (result == ncclSuccess) return;
  throw CommunicationError("communicator " + name + ": " + call + ": " + ncclGetErrorString(result) + ": " +
                           ncclGetLastError(comm));
}

/// Collectives of several communicators wait for each other on a device that has no room for all, for ever if
/// ranks launch them in different orders. Ranks issue them in one order; this makes NCCL launch them in that
/// order even from different streams. NCCL reads it when the first communicator is made.
void launch_in_issue_order() {
  (void)setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
}

ncclConfig_t nccl_config(const std::string& name, int max_ctas, bool zero_ctas) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  config.commName = name.c_str();
  if (max_ctas != 0) config.maxCTAs = max_ctas;
  if (zero_ctas) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
  return config;
}

}  // namespace

Communicator::Communicator(Bootstrap& bootstrap, const Options& options) : name_(options.name) {
  launch_in_issue_order();
  const Group group =
      options.group.count > 0 ? options.group : Group{.first = 0, .stride = 1, .count = bootstrap.size()};
  const std::vector<Introduction> all = introduce(bootstrap, name_, group);
  rank_ = group.position_of(bootstrap.rank());
  facts_ = facts_of(all, group);
  facts_.peer_access = bootstrap.max(reaches_peers(all, group, bootstrap.rank()) ? 0 : 1) == 0;
  facts_.no_window = "no arena is registered";
  facts_.zero_ctas = options.zero_ctas;
  facts_.max_ctas = options.max_ctas;
  ncclConfig_t config = nccl_config(name_, options.max_ctas, choose_path(facts_).zero_ctas);
  check(ncclCommInitRankConfig(&comm_, group.count, all[group.first].id, rank_, &config), name_,
        "ncclCommInitRankConfig", nullptr);
}

Communicator::~Communicator() {
  // After a failure the other ranks may never arrive where destroy waits for them.
  (void)(asynchronous_error().empty() ? ncclCommDestroy(comm_) : ncclCommAbort(comm_));
}

void Communicator::all_gather(void* full, const void* shard, int64_t count, DType dtype,
                              cudaStream_t stream) {
  check(ncclAllGather(shard, full, narrow<size_t>(count), nccl_type(dtype), comm_, stream), name_,
        describe_call("ncclAllGather", count, dtype), comm_);
  traffic_.all_gather_calls++;
  traffic_.all_gather_bytes += (size() - 1) * count * minillm::size_of(dtype);
}

void Communicator::reduce_scatter(void* shard, const void* full, int64_t count, DType dtype,
                                  cudaStream_t stream) {
  require_sums();
  check(ncclReduceScatter(full, shard, narrow<size_t>(count), nccl_type(dtype), ncclSum, comm_, stream),
        name_, describe_call("ncclReduceScatter", count, dtype), comm_);
  traffic_.reduce_scatter_calls++;
  traffic_.reduce_scatter_bytes += (size() - 1) * count * minillm::size_of(dtype);
}

void Communicator::all_reduce(float* values, int64_t count, cudaStream_t stream) {
  require_sums();
  check(ncclAllReduce(values, values, narrow<size_t>(count), ncclFloat32, ncclSum, comm_, stream), name_,
        describe_call("ncclAllReduce", count, DType::kFp32), comm_);
  traffic_.all_reduce_calls++;
  traffic_.all_reduce_bytes += int64_t{2} * (size() - 1) * count * minillm::size_of(DType::kFp32) / size();
}

// Its window is there for copies. Kernels of some versions of NCCL are better kept out of it.
void Communicator::require_sums() const {
  if (facts_.zero_ctas)
    throw InternalError("communicator " + name_ + " was made for gathers by copy engines and makes no sums");
}

void Communicator::fuse(const std::function<void()>& calls) {
  check(ncclGroupStart(), name_, "ncclGroupStart", comm_);
  try {
    calls();
  } catch (...) {
    (void)ncclGroupEnd();  // else NCCL would hold back all later collectives of this thread
    throw;
  }
  check(ncclGroupEnd(), name_, "ncclGroupEnd", comm_);
}

std::string Communicator::describe() const {
  return name_ + ": " + choose_path(facts_).text;
}

std::string Communicator::asynchronous_error() const {
  ncclResult_t error = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &error);
  if (asked != ncclSuccess) error = asked;
  if (error == ncclSuccess || error == ncclInProgress) return "";
  return std::string(ncclGetErrorString(error)) + ": " + ncclGetLastError(comm_);
}

}  // namespace minillm::comm
