#include "comm/introduction.h"

#include <cuda_runtime.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>

#include "core/checked.h"
#include "core/error.h"
#include "cuda/check.h"

namespace minillm::comm {
namespace {

void fill_in_place(Introduction& mine) {
  if (const char* id = std::getenv("NCCL_HOSTID"))
    std::strncpy(mine.node, id, sizeof mine.node - 1);
  else
    (void)gethostname(mine.node, sizeof mine.node - 1);
  int device = 0;
  cuda::check(cudaGetDevice(&device));
  cuda::check(cudaDeviceGetPCIBusId(mine.device, sizeof mine.device, device));
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
  std::vector<Introduction> all(static_cast<size_t>(bootstrap.size()));
  bootstrap.gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  bootstrap.broadcast(std::as_writable_bytes(std::span(all)));
  require_division(all, name);
  for (const Introduction& each : all)
    if (each.id_result != ncclSuccess)
      throw CommunicationError("communicator " + name + ": ncclGetUniqueId on rank " +
                               std::to_string(each.group.first) + ": " + ncclGetErrorString(each.id_result));
  return all;
}

int count_nodes(std::span<const Introduction> all, const Group& group) {
  std::set<std::string_view> nodes;
  for (int position = 0; position < group.count; ++position) nodes.insert(all[group.rank_at(position)].node);
  return narrow<int>(nodes.size());
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
