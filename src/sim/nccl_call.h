// A collective as one rank calls it: what the ranks compare before any data moves.
#pragma once

#include <nccl.h>

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace nccl_over_mpi {

enum class Collective : int32_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast };

/// Where a buffer lies among the symmetric windows of its communicator.
struct Placement {
  int64_t window = -1;  ///< its number, which is the same on all ranks; -1: in none
  int64_t offset = 0;   ///< bytes
  auto operator<=>(const Placement&) const = default;
};

/// Sent between processes as bytes: no pointers, no padding.
struct Call {
  int64_t sequence = 0;  ///< which collective of its communicator, from 1
  /// As given to the call: elements of the piece of one rank for the gather and the scatter.
  int64_t count = 0;
  Placement send, receive;
  Collective collective = Collective::kAllGather;
  int32_t type = 0;  ///< ncclDataType_t
  int32_t root = 0;
  int32_t unused = 0;
  auto operator<=>(const Call&) const = default;
};
static_assert(std::has_unique_object_representations_v<Call>);

/// Elements of the caller's buffers, and of the staging memory that the collective needs.
struct Extent {
  int64_t sent, received, staged;
};
Extent extent_of(const Call& call, int size, int rank);

const char* name_of(Collective collective);
/// "bf16", or null for a type that is not supported.
const char* name_of(ncclDataType_t type);
int64_t size_of(ncclDataType_t type);

/// "ncclAllGather of 128 bf16"; a broadcast also names its root, buffers in windows their places.
std::string describe(const Call& call);

/// What differs between the calls of the ranks named `ranks`, or an empty string when they agree.
std::string describe_mismatch(const std::string& communicator, std::span<const Call> calls,
                              std::span<const int> ranks);

}  // namespace nccl_over_mpi
