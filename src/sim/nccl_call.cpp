#include "sim/nccl_call.h"

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

std::string describe(const Call& call) {
  std::string text = std::string(name_of(call.collective)) + " of " + std::to_string(call.count) + " " +
                     name_of(static_cast<ncclDataType_t>(call.type));
  if (call.collective == Collective::kBroadcast) text += " from root " + std::to_string(call.root);
  return text;
}

std::string describe_mismatch(const std::string& communicator, std::span<const Call> calls) {
  constexpr size_t kMostRanksNamed = 16;
  bool equal = true;
  for (const Call& call : calls) equal = equal && call == calls[0];
  if (equal) return "";
  std::string text =
      "communicator " + communicator + ", collective #" + std::to_string(calls[0].sequence) + ": ";
  for (size_t rank = 0; rank < calls.size() && rank < kMostRanksNamed; ++rank) {
    text += (rank ? ", rank " : "rank ") + std::to_string(rank) + " calls " + describe(calls[rank]);
    if (calls[rank].sequence != calls[0].sequence)
      text += " as collective #" + std::to_string(calls[rank].sequence);
  }
  return calls.size() > kMostRanksNamed ? text + ", …" : text;
}

}  // namespace nccl_over_mpi
