// How the ranks of a job find each other, and the few host-side exchanges that training needs outside NCCL.
//
// Two implementations: MPI (built with MINILLM_MPI, started by mpirun or srun) and a single process. MPI is
// used for control only, never on device buffers of a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "comm/group.h"

namespace minillm::comm {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Rank among the processes of this machine: which GPU to take.
  virtual int local_rank() const = 0;
  virtual int local_size() const = 0;

  virtual void barrier() = 0;
  /// Overwrites `bytes` on all ranks with rank 0's.
  virtual void broadcast(std::span<std::byte> bytes) = 0;
  /// On the first rank of `group`, all[count * part.size()] = the parts of its ranks in order; all members
  /// give parts of one size, the others' `all` is not touched, and other ranks do not call. The first rank's
  /// part may lie in its place already.
  virtual void gather(const Group& group, std::span<const std::byte> part, std::span<std::byte> all) = 0;
  /// All ranks.
  Group everyone() const { return {.first = 0, .stride = 1, .count = size()}; }
  /// The maximum over ranks, on every rank.
  virtual int64_t max(int64_t value) = 0;

  /// Ends all ranks now with `exit_code`; never returns. Callable from any thread and after errors.
  [[noreturn]] virtual void abort(int exit_code) = 0;
};

/// Rank 0's text, on all ranks.
std::string broadcast(Bootstrap& bootstrap, std::string text);

/// The ranks that a launcher started, over MPI; a single process where there is no launcher, or no MPI in the
/// build. What counts as one are the variables that mpirun, mpiexec and srun give to each rank, not those of
/// a Slurm allocation or batch script. Throws CommunicationError when the environment says that this is one
/// of several ranks but MPI is absent or sees only one (a launcher that does not speak this MPI starts N lone
/// processes), naming the variable that says so. An MPI that cannot start prints why and ends the process
/// itself, with the exit code of a CommunicationError where it is Open MPI.
std::unique_ptr<Bootstrap> make_bootstrap(int* argc, char*** argv);

/// For implementations of gather(): throws InternalError when this rank is not in `group`, or `all` has not
/// the size that it needs.
void check_gather(const Bootstrap& bootstrap, const Group& group, std::span<const std::byte> part,
                  std::span<std::byte> all);

/// One process that is alone, whatever a launcher started.
std::unique_ptr<Bootstrap> make_single_process();

}  // namespace minillm::comm
