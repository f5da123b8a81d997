#include "comm/communicator.h"

#include <utility>

#include "core/checked.h"
#include "core/error.h"

namespace minillm::comm {
namespace {

ncclDataType_t nccl_type(DType type) {
  return type == DType::kFp32 ? ncclFloat32 : ncclBfloat16;
}

std::string describe(const char* call, int64_t count, DType type) {
  return std::string(call) + " of " + std::to_string(count) + " " + std::string(name_of(type));
}

void check(ncclResult_t result, const std::string& name, const std::string& call, ncclComm_t comm) {
  if (result == ncclSuccess) return;
  throw CommunicationError("communicator " + name + ": " + call + ": " + ncclGetErrorString(result) + ": " +
                           ncclGetLastError(comm));
}

}  // namespace

Communicator::Communicator(Bootstrap& bootstrap, std::string name)
    : name_(std::move(name)), rank_(bootstrap.rank()), size_(bootstrap.size()) {
  ncclUniqueId id{};
  // A failure on rank 0 is thrown after the broadcast: the others wait in it.
  const ncclResult_t got_id = rank_ == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
  bootstrap.broadcast(std::as_writable_bytes(std::span(id.internal)));
  check(got_id, name_, "ncclGetUniqueId", nullptr);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  config.commName = name_.c_str();
  check(ncclCommInitRankConfig(&comm_, size_, id, rank_, &config), name_, "ncclCommInitRankConfig", nullptr);
}

Communicator::~Communicator() {
  // After a failure the other ranks may never arrive where destroy waits for them.
  (void)(asynchronous_error().empty() ? ncclCommDestroy(comm_) : ncclCommAbort(comm_));
}

void Communicator::all_gather(void* full, const void* shard, int64_t count, DType dtype,
                              cudaStream_t stream) {
  check(ncclAllGather(shard, full, narrow<size_t>(count), nccl_type(dtype), comm_, stream), name_,
        describe("ncclAllGather", count, dtype), comm_);
  traffic_.all_gather_calls++;
  traffic_.all_gather_bytes += (size_ - 1) * count * minillm::size_of(dtype);
}

void Communicator::reduce_scatter(float* shard, const float* full, int64_t count, cudaStream_t stream) {
  check(ncclReduceScatter(full, shard, narrow<size_t>(count), ncclFloat32, ncclSum, comm_, stream), name_,
        describe("ncclReduceScatter", count, DType::kFp32), comm_);
  traffic_.reduce_scatter_calls++;
  traffic_.reduce_scatter_bytes += (size_ - 1) * count * minillm::size_of(DType::kFp32);
}

void Communicator::all_reduce(float* values, int64_t count, cudaStream_t stream) {
  check(ncclAllReduce(values, values, narrow<size_t>(count), ncclFloat32, ncclSum, comm_, stream), name_,
        describe("ncclAllReduce", count, DType::kFp32), comm_);
  traffic_.all_reduce_calls++;
  traffic_.all_reduce_bytes += int64_t{2} * (size_ - 1) * count * minillm::size_of(DType::kFp32) / size_;
}

std::string Communicator::asynchronous_error() const {
  ncclResult_t error = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &error);
  if (asked != ncclSuccess) error = asked;
  if (error == ncclSuccess || error == ncclInProgress) return "";
  return std::string(ncclGetErrorString(error)) + ": " + ncclGetLastError(comm_);
}

}  // namespace minillm::comm
