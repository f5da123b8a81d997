#include "comm/introduction.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <set>
#include <string_view>

#include "core/checked.h"
#include "core/error.h"
#include "cuda/check.h"
#include "cuda/device.h"

namespace minillm::comm {
namespace {

template <size_t size>
void copy(char (&to)[size], const std::string& from) {
  std::strncpy(to, from.c_str(), size - 1);
}

void fill_in_place(Introduction& mine) {
  if (const char* id = std::getenv("NCCL_HOSTID"))
    copy(mine.node, id);
  else
    (void)gethostname(mine.node, sizeof mine.node - 1);
  int device = 0;
  cuda::check(cudaGetDevice(&device));
  cuda::check(cudaDeviceGetPCIBusId(mine.device, sizeof mine.device, device));
}

void fill_in_abilities(Introduction& mine) {
  (void)ncclGetVersion(&mine.nccl_version);
  cuda::check(cudaDriverGetVersion(&mine.driver_version));
  mine.compute_capability = cuda::compute_capability();
  mine.virtual_memory = cuda::has_virtual_memory_management();
  copy(mine.windows_off_by, windows_off_by());
  copy(mine.copy_engines_off_by, copy_engines_off_by());
}

/// As NCCL divides ranks into teams: what divides the lengths of all rows of ranks on one machine.
int count_node_ranks(std::span<const Introduction> all, const Group& group) {
  int divisor = 0, row = 0;
  for (int position = 0; position < group.count; ++position) {
    const char* const node = all[group.rank_at(position)].node;
    ++row;
    if (position + 1 < group.count && std::strcmp(all[group.rank_at(position + 1)].node, node) == 0) continue;
    divisor = std::gcd(divisor, row);
    row = 0;
  }
  return divisor;
}

std::string text_of(const Group& group) {
  return std::to_string(group.count) + " ranks from " + std::to_string(group.first) + " in steps of " +
         std::to_string(group.stride);
}

bool is_valid(const Group& group, int world) {
  return group.count > 0 && group.stride > 0 && group.first >= 0 &&
         int64_t{group.first} + int64_t{group.count - 1} * group.stride < world;
}

/// Every rank looks at all groups, so that all find the same fault and none waits for those who threw.
void require_division(std::span<const Introduction> all, const std::string& name) {
  const int world = narrow<int>(all.size());
  for (int rank = 0; rank < world; ++rank) {
    const Group& group = all[rank].group;
    const std::string who = "communicator " + name + ": rank " + std::to_string(rank) +
                            " asks for the group of " + text_of(group) + ", ";
    if (!is_valid(group, world))
      throw CommunicationError(who + "but the job has the ranks 0 to " + std::to_string(world - 1));
    if (group.position_of(rank) < 0) throw CommunicationError(who + "but is no member of it");
    for (int position = 0; position < group.count; ++position) {
      const int member = group.rank_at(position);
      if (all[member].group == group) continue;
      throw CommunicationError(who + "but its member " + std::to_string(member) + " for that of " +
                               text_of(all[member].group) + "; each rank has to be in one group");
    }
  }
}

}  // namespace

std::vector<Introduction> introduce(Bootstrap& bootstrap, const std::string& name, const Group& group) {
  Introduction mine{.group = group};
  if (bootstrap.rank() == group.first) mine.id_result = ncclGetUniqueId(&mine.id);
  fill_in_place(mine);
  fill_in_abilities(mine);
  std::vector<Introduction> all(static_cast<size_t>(bootstrap.size()));
  bootstrap.gather(bootstrap.everyone(), std::as_bytes(std::span(&mine, 1)),
                   std::as_writable_bytes(std::span(all)));
  bootstrap.broadcast(std::as_writable_bytes(std::span(all)));
  require_division(all, name);
  for (const Introduction& each : all)
    if (each.id_result != ncclSuccess)
      throw CommunicationError("communicator " + name + ": ncclGetUniqueId on rank " +
                               std::to_string(each.group.first) + ": " + ncclGetErrorString(each.id_result));
  return all;
}

PathFacts facts_of(std::span<const Introduction> all, const Group& group) {
  const Introduction& first = all[group.first];
  PathFacts facts{.ranks = group.count,
                  .node_ranks = count_node_ranks(all, group),
                  .nccl_version = first.nccl_version,
                  .driver_version = first.driver_version};
  std::set<std::string_view> nodes;
  for (int position = 0; position < group.count; ++position) {
    const Introduction& member = all[group.rank_at(position)];
    nodes.insert(member.node);
    facts.nccl_version = std::min(facts.nccl_version, member.nccl_version);
    facts.driver_version = std::min(facts.driver_version, member.driver_version);
    facts.compute_capability = std::max(facts.compute_capability, member.compute_capability);
    facts.virtual_memory &= member.virtual_memory;
    if (facts.windows_off_by.empty()) facts.windows_off_by = member.windows_off_by;
    if (facts.copy_engines_off_by.empty()) facts.copy_engines_off_by = member.copy_engines_off_by;
  }
  facts.nodes = narrow<int>(nodes.size());
  return facts;
}

bool reaches_peers(std::span<const Introduction> all, const Group& group, int rank) {
  const Introduction& mine = all[rank];
  int device = 0;
  cuda::check(cudaGetDevice(&device));
  for (int position = 0; position < group.count; ++position) {
    const Introduction& other = all[group.rank_at(position)];
    if (std::strcmp(other.node, mine.node) != 0 || std::strcmp(other.device, mine.device) == 0) continue;
    int peer = 0, can_access = 1;
    // A launcher may show each process its own device only; NCCL connects such devices, too.
    if (cudaDeviceGetByPCIBusId(&peer, other.device) != cudaSuccess) {
      (void)cudaGetLastError();
      continue;
    }
    cuda::check(cudaDeviceCanAccessPeer(&can_access, device, peer));
    if (can_access == 0) return false;
  }
  return true;
}

}  // namespace minillm::comm
