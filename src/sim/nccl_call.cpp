#include "sim/nccl_call.h"

#include "sim/nccl_transport.h"

namespace nccl_over_mpi {

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "ncclAllGather";
    case Collective::kReduceScatter:
      return "ncclReduceScatter";
    case Collective::kAllReduce:
      return "ncclAllReduce";
    case Collective::kBroadcast:
      return "ncclBroadcast";
  }
  return "an unknown collective";
}

const char* name_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return "int8";
    case ncclUint8:
      return "uint8";
    case ncclInt32:
      return "int32";
    case ncclUint32:
      return "uint32";
    case ncclInt64:
      return "int64";
    case ncclUint64:
      return "uint64";
    case ncclFloat16:
      return "fp16";
    case ncclFloat32:
      return "fp32";
    case ncclFloat64:
      return "fp64";
    case ncclBfloat16:
      return "bf16";
    default:
      return nullptr;
  }
}

int64_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

Extent extent_of(const Call& call, int size, int rank) {
  const int64_t count = call.count, all = count * size;
  switch (call.collective) {
    case Collective::kAllGather:
      return {count, all, all};
    case Collective::kReduceScatter:
      return {all, count, all};
    case Collective::kAllReduce:
      return {count, count, (count + size - 1) / size * size};
    case Collective::kBroadcast:
      return {rank == call.root ? count : 0, count, count};
  }
  throw Failure(ncclInternalError, "unknown collective");
}

namespace {

std::string describe(const Placement& placement) {
  if (placement.window < 0) return "outside of windows";
  return "window " + std::to_string(placement.window) + " offset " + std::to_string(placement.offset);
}

/// The call without its places in windows.
Call unplaced(Call call) {
  call.send = call.receive = {};
  return call;
}

}  // namespace

std::string describe(const Call& call) {
  std::string text = std::string(name_of(call.collective)) + " of " + std::to_string(call.count) + " " +
                     name_of(static_cast<ncclDataType_t>(call.type));
  if (call.collective == Collective::kBroadcast) text += " from root " + std::to_string(call.root);
  if (call.send.window >= 0 || call.receive.window >= 0)
    text += " from " + describe(call.send) + " to " + describe(call.receive);
  return text;
}

std::string describe_mismatch(const std::string& communicator, std::span<const Call> calls,
                              std::span<const int> ranks) {
  constexpr size_t kMostRanksNamed = 16;
  bool equal = true, equal_but_placed = true;
  for (const Call& call : calls) {
    equal = equal && call == calls[0];
    equal_but_placed = equal_but_placed && unplaced(call) == unplaced(calls[0]);
  }
  if (equal) return "";
  std::string text =
      "communicator " + communicator + ", collective #" + std::to_string(calls[0].sequence) + ": ";
  for (size_t i = 0; i < calls.size() && i < kMostRanksNamed; ++i) {
    text += (i ? ", rank " : "rank ") + std::to_string(ranks[i]) + " calls " + describe(calls[i]);
    if (calls[i].sequence != calls[0].sequence)
      text += " as collective #" + std::to_string(calls[i].sequence);
  }
  if (calls.size() > kMostRanksNamed) text += ", …";
  if (equal_but_placed) text += "; buffers in symmetric windows need the same offsets on all ranks";
  return text;
}

}  // namespace nccl_over_mpi
