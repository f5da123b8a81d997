// Which way NCCL moves a communicator's data, as far as it can be known from outside.
//
// NCCL falls back silently. Whoever runs a job wants to know that its gathers cost no multiprocessors, or why
// they do.
#pragma once

#include <string>

namespace minillm::comm {

/// What decides. Versions are coded as ncclGetVersion and cudaDriverGetVersion give them.
struct PathFacts {
  int ranks = 1;
  int nodes = 1;  ///< machines that the ranks run on
  /// All ranks of a node reach each other's device. Devices that are hidden from a process count as reached,
  /// as NCCL counts them.
  bool peer_access = true;
  int nccl_version = 0;
  int driver_version = 0;
  std::string disabled_by;  ///< a setting that turns symmetric windows off, or empty
  std::string no_window;    ///< why the arena is no window of the communicator, or empty
  bool zero_ctas = false;   ///< copy engines are asked for
  int max_ctas = 0;         ///< 0: NCCL's choice
};

/// The variable of the environment that turns symmetric windows off, "NAME=0", or an empty string.
std::string windows_disabled_by();

/// One line, such as "copy engines in symmetric windows (NCCL 2.28.9)" or "NCCL's kernels on at most 16 CTAs;
/// no copy engines: the ranks are on 2 nodes, they have to be on one (NCCL 2.28.9)".
std::string describe_path(const PathFacts& facts);

}  // namespace minillm::comm
