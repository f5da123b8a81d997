// Sums of the NCCL stand-in.
#pragma once

#include <nccl.h>

#include <cstdint>

namespace nccl_over_mpi {

/// Whether sums of the type exist here: fp32 and bf16.
bool can_sum(ncclDataType_t type);

/// result[i] = the sum over r of pieces[r * count + i], added in the order of r in fp32, rounded once to
/// `type`.
void sum_in_rank_order(ncclDataType_t type, const void* pieces, int nranks, int64_t count, void* result);

}  // namespace nccl_over_mpi
