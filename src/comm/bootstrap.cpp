#include "comm/bootstrap.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/error.h"
#if defined(MINILLM_WITH_MPI)
#include "comm/mpi_bootstrap.h"
#endif

namespace minillm::comm {
namespace {

class SingleProcess final : public Bootstrap {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_size() const override { return 1; }
  void barrier() override {}
  void broadcast(std::span<std::byte>) override {}
  void gather(const Group& group, std::span<const std::byte> part, std::span<std::byte> all) override {
    check_gather(*this, group, part, all);
    if (part.data() != all.data()) std::ranges::copy(part, all.begin());
  }
  int64_t max(int64_t value) override { return value; }
  [[noreturn]] void abort(int exit_code) override {
    std::fflush(nullptr);
    std::_Exit(exit_code);
  }
};

/// The number of ranks in a launcher's variable; 0 when it is not set.
long announced_ranks(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr ? std::atol(value) : 0;
}

#if defined(MINILLM_WITH_MPI)
/// Whether a launcher whose ranks MPI can connect started this process. Without one MPI would start services
/// of its own, which want a remote shell and a writable TMPDIR and end the process where these are missing.
bool has_mpi_launcher() {
  // Open MPI; PMIx (Open MPI, srun --mpi=pmix); PMI (MPICH, Intel MPI, srun --mpi=pmi2); HPE Cray.
  constexpr const char* kOfRanks[] = {
      "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PALS_RANKID"};
  if (std::ranges::any_of(kOfRanks, [](const char* variable) { return std::getenv(variable) != nullptr; }))
    return true;
  // A step of srun alone: an MPI that was built with Slurm's own library needs nothing else. Allocations and
  // batch scripts have the other variables of Slurm, too, and are no ranks.
  return announced_ranks("SLURM_STEP_NUM_TASKS") > 1;
}
#endif

/// Throws when a launcher's variable says that this lone process should be one of several.
void refuse_lone_rank(const std::string& remedy) {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "WORLD_SIZE"}) {
    if (announced_ranks(variable) <= 1) continue;
    throw CommunicationError(std::string("the launcher started several ranks (") + variable + "=" +
                             std::getenv(variable) + "), but this process sees only itself: " + remedy +
                             "; for a single rank unset " + variable);
  }
}

}  // namespace

std::string broadcast(Bootstrap& bootstrap, std::string text) {
  text.resize(static_cast<size_t>(bootstrap.max(bootstrap.rank() == 0 ? std::ssize(text) : 0)));
  bootstrap.broadcast(std::as_writable_bytes(std::span(text)));
  return text;
}

void check_gather(const Bootstrap& bootstrap, const Group& group, std::span<const std::byte> part,
                  std::span<std::byte> all) {
  const int position = group.position_of(bootstrap.rank());
  if (position < 0)
    throw InternalError("Bootstrap::gather: rank " + std::to_string(bootstrap.rank()) +
                        " is not in the group");
  if (position == 0 && all.size() != part.size() * static_cast<size_t>(group.count))
    throw InternalError("Bootstrap::gather: " + std::to_string(all.size()) + " bytes for " +
                        std::to_string(group.count) + " parts of " + std::to_string(part.size()));
}

std::unique_ptr<Bootstrap> make_single_process() {
  return std::make_unique<SingleProcess>();
}

std::unique_ptr<Bootstrap> make_bootstrap(int* argc, char*** argv) {
#if defined(MINILLM_WITH_MPI)
  std::unique_ptr<Bootstrap> bootstrap =
      has_mpi_launcher() ? make_mpi_bootstrap(argc, argv) : make_single_process();
  if (bootstrap->size() == 1)
    refuse_lone_rank("start it with the mpirun of the MPI it was built with, or with srun --mpi=pmix");
  return bootstrap;
#else
  (void)argc, (void)argv;
  refuse_lone_rank("it was built without MPI, configure it with MINILLM_MPI=ON");
  return make_single_process();
#endif
}

}  // namespace minillm::comm
