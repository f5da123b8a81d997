// Which way NCCL moves a communicator's data: what is asked of it, and what it makes of that as far as it can
// be known from outside.
//
// NCCL falls back silently, and some versions are wrong silently. Whoever runs a job wants to know that its
// gathers cost no multiprocessors, or why they do; and that its sums are right.
#pragma once

#include <string>

namespace minillm::comm {

/// What decides, the same on all ranks of the communicator. Versions are coded as ncclGetVersion and
/// cudaDriverGetVersion give them.
struct PathFacts {
  int ranks = 1;
  int nodes = 1;  ///< machines that the ranks run on
  /// Ranks of one machine whose copy engines wait for each other: all of them if all machines have as many.
  int node_ranks = 1;
  /// All ranks of a node reach each other's device. Devices that are hidden from a process count as reached,
  /// as NCCL counts them.
  bool peer_access = true;
  bool virtual_memory = true;  ///< all devices have the memory that symmetric windows are made of
  int compute_capability = 0;  ///< the highest of the devices, 90 for 9.0
  int nccl_version = 0;
  int driver_version = 0;
  std::string windows_off_by = {};       ///< a setting that turns symmetric windows off, or empty
  std::string copy_engines_off_by = {};  ///< and copy engines
  std::string no_window = {};            ///< why the arena is no window of the communicator, or empty
  bool zero_ctas = false;                ///< copy engines are wanted, for gathers
  int max_ctas = 0;                      ///< 0: NCCL's choice
};

struct Path {
  bool zero_ctas = false;  ///< copy engines are asked for
  /// The arena is to be registered as a symmetric window, which does no harm. Independent of
  /// PathFacts::no_window.
  bool window = false;
  /// One line, such as "copy engines in symmetric windows (NCCL 2.28.9)" or "NCCL's kernels on at most 16
  /// CTAs; no symmetric windows: the ranks are on 2 nodes, they have to be on one (NCCL 2.28.9)".
  std::string text = {};
};

/// Keeps clear of two faults of NCCL, both on compute capability 9.0 and higher.
///
/// From 2.28.0 to 2.30.6 kernels in symmetric windows start before what is ahead of them in the stream has
/// written their input. So communicators have no window unless their collectives are copies. It takes a
/// window of the communicator itself: the same memory may be one of another communicator.
///
/// From 2.29.7 to 2.31.1 copy engines of exactly two ranks of a machine may wait for each other for ever
/// (NVIDIA/nccl issue 2241). So they are not asked for; and as NCCL takes them unasked for large gathers in
/// windows on 10.0 and higher, there is no window there either.
Path choose_path(const PathFacts& facts);

/// A remark for the user when collectives of the communicator are captured in a CUDA graph, or an empty
/// string.
std::string graph_remark(const PathFacts& facts);

/// The variables of the environment that turn symmetric windows and copy engines off, as "NAME=VALUE", or an
/// empty string.
std::string windows_off_by();
std::string copy_engines_off_by();

}  // namespace minillm::comm
