// A collective as one rank calls it: what the ranks compare before any data moves.
#pragma once

#include <nccl.h>

#include <compare>
#include <cstdint>
#include <span>
#include <string>

namespace nccl_over_mpi {

enum class Collective : int32_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast };

/// Sent between processes as bytes: no pointers, no padding.
struct Call {
  int64_t sequence = 0;  ///< which collective of its communicator, from 1
  int64_t count =
      0;  ///< as given to the call: elements of the piece of one rank for the gather and the scatter
  Collective collective = Collective::kAllGather;
  int32_t type = 0;  ///< ncclDataType_t
  int32_t root = 0;
  int32_t unused = 0;
  auto operator<=>(const Call&) const = default;
};
static_assert(sizeof(Call) == 32);

const char* name_of(Collective collective);
/// "bf16", or null for a type that is not supported.
const char* name_of(ncclDataType_t type);
int64_t size_of(ncclDataType_t type);

/// "ncclAllGather of 128 bf16"; a broadcast also names its root.
std::string describe(const Call& call);

/// What differs between the ranks' calls, or an empty string when they agree.
std::string describe_mismatch(const std::string& communicator, std::span<const Call> calls);

}  // namespace nccl_over_mpi
