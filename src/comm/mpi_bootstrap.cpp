#include "comm/mpi_bootstrap.h"

#define OMPI_SKIP_MPICXX 1  // the C++ bindings that MPI dropped in 2012 do not compile without warnings
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/checked.h"
#include "core/error.h"

namespace minillm::comm {
namespace {

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw CommunicationError(std::string(call) + ": " + std::string(text, length));
}

constexpr int kGatherTag = 1;

/// MPI_Init_thread is running.
std::atomic<bool> starting = false;

/// MPI counts in int; a unit of a large model has more bytes than that.
template <class Transfer>
void in_pieces(size_t bytes, const Transfer& transfer) {
  constexpr size_t kPiece = size_t{1} << 30;
  for (size_t first = 0; first < bytes; first += kPiece)
    transfer(first, static_cast<int>(std::min(kPiece, bytes - first)));
}

class MpiBootstrap final : public Bootstrap {
 public:
  MpiBootstrap() {
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
    MPI_Comm machine;
    check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &machine),
          "MPI_Comm_split_type");
    check(MPI_Comm_rank(machine, &local_rank_), "MPI_Comm_rank");
    check(MPI_Comm_size(machine, &local_size_), "MPI_Comm_size");
    check(MPI_Comm_free(&machine), "MPI_Comm_free");
  }

  ~MpiBootstrap() override { (void)MPI_Finalize(); }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }

  void barrier() override { check(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier"); }

  void broadcast(std::span<std::byte> bytes) override {
    check(MPI_Bcast(bytes.data(), narrow<int>(bytes.size()), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
  }

  void gather(const Group& group, std::span<const std::byte> part, std::span<std::byte> all) override {
    check_gather(*this, group, part, all);
    const int root = group.first;
    if (rank_ != root)
      return in_pieces(part.size(), [&](size_t first, int bytes) {
        check(MPI_Send(part.data() + first, bytes, MPI_BYTE, root, kGatherTag, MPI_COMM_WORLD), "MPI_Send");
      });
    if (part.data() != all.data()) std::ranges::copy(part, all.begin());
    for (int position = 1; position < group.count; ++position)
      in_pieces(part.size(), [&](size_t first, int bytes) {
        std::byte* const to = all.data() + static_cast<size_t>(position) * part.size() + first;
        check(MPI_Recv(to, bytes, MPI_BYTE, group.rank_at(position), kGatherTag, MPI_COMM_WORLD,
                       MPI_STATUS_IGNORE),
              "MPI_Recv");
      });
  }

  int64_t max(int64_t value) override {
    int64_t result = value;
    check(MPI_Allreduce(&value, &result, 1, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
    return result;
  }

  [[noreturn]] void abort(int exit_code) override {
    std::fflush(nullptr);  // MPI_Abort kills without flushing
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
  }

 private:
  int rank_ = 0, size_ = 1, local_rank_ = 0, local_size_ = 1;
};

}  // namespace

std::unique_ptr<Bootstrap> make_mpi_bootstrap(int* argc, char*** argv) {
  int started = 0, provided = MPI_THREAD_SINGLE;
  MPI_Initialized(&started);
  if (started)
    throw CommunicationError("MPI was already started by this process: it can be started only once");
  // hwloc, which MPI asks about the machine, would look for GPUs at the X displays 0 to 9: ten times the time
  // that a display or a name server takes to answer, for ever where a display does not.
  (void)setenv("HWLOC_COMPONENTS", "-gl", 0);
  starting = true;
  const int result = MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided);
  starting = false;
  check(result, "MPI_Init_thread");
  auto bootstrap = std::make_unique<MpiBootstrap>();
  if (provided < MPI_THREAD_MULTIPLE)
    throw CommunicationError(
        "this MPI library has no MPI_THREAD_MULTIPLE, which the collectives need: use a build of MPI with "
        "thread "
        "support");
  return bootstrap;
}

}  // namespace minillm::comm

/// Open MPI calls this where it cannot start, with code 1: there is no error handler to set before its start.
/// The program's own definition comes before the C library's, and keeps the meaning of exit codes.
extern "C" void _exit(int code) {
  if (minillm::comm::starting) {
    constexpr std::string_view kText =
        "error: MPI could not start, and says why above: start ranks with the mpirun of the MPI that this "
        "program was built with, or with srun --mpi=pmix\n";
    (void)!write(STDERR_FILENO, kText.data(), kText.size());
    code = static_cast<int>(minillm::ExitCode::kCommunication);
  }
  std::_Exit(code);
}
