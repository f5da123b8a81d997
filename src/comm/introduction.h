// What ranks tell each other before a communicator is made.
#pragma once

#include <nccl.h>

#include <span>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/group.h"
#include "comm/path.h"

namespace minillm::comm {

/// Sent between processes as bytes.
struct Introduction {
  Group group;
  /// Of the group's first rank; others have none.
  ncclResult_t id_result = ncclSuccess;
  ncclUniqueId id = {};
  char node[256] = {};   ///< the machine's name, as NCCL tells machines apart
  char device[32] = {};  ///< PCI bus id
  int nccl_version = 0, driver_version = 0, compute_capability = 0;
  bool virtual_memory = false;
  /// Settings of this process's environment, cut to fit (path.h).
  char windows_off_by[64] = {}, copy_engines_off_by[64] = {};
};

/// The introductions of all ranks, in rank order. Collective over the bootstrap. Throws CommunicationError on
/// all ranks when the groups do not divide them; `name` is the communicator's.
std::vector<Introduction> introduce(Bootstrap& bootstrap, const std::string& name, const Group& group);

/// What its members' introductions say about a group; the rest of the facts is as it was made.
PathFacts facts_of(std::span<const Introduction> all, const Group& group);

/// Whether this process's device reaches those of the group's other ranks on its machine.
bool reaches_peers(std::span<const Introduction> all, const Group& group, int rank);

}  // namespace minillm::comm
