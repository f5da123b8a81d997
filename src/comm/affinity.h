// Ranks that a launcher bound to one core each.
//
// Such a rank's threads (the one that issues work, NCCL's, CUDA's, the watchdog) take turns on it. `mpirun`
// does that by default to jobs of two ranks and fewer.
#pragma once

#include <span>
#include <string>

#include "comm/bootstrap.h"

namespace minillm::comm {

/// Cores of the machine among these processors, of which a core may have several. `topology` is the folder in
/// which Linux tells; a processor that it does not tell of counts as a core.
int count_cores(std::span<const int> processors, const std::string& topology = "/sys/devices/system/cpu");

/// What one rank may use, and what there is.
struct Cores {
  int allowed = 1;
  int present = 1;
};

/// One line for the user when ranks may use one core only of a machine that has more, else an empty string.
std::string affinity_warning(std::span<const Cores> ranks);

/// The same for the ranks of this job, on rank 0; an empty string elsewhere. Collective.
std::string affinity_warning(Bootstrap& bootstrap);

}  // namespace minillm::comm
