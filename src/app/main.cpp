#include <cstdlib>
#include <exception>
#include <iostream>

#include "app/cli.h"
#include "app/standard_output.h"
#include "comm/failure.h"
#include "core/error.h"

namespace minillm::app {
namespace {

/// Streams beyond the number of connections share one, and what is in one waits for what is before it, also
/// of other streams: the default of 8 is fewer than a step's streams and NCCL's. CUDA reads it when it is
/// initialised, which MPI may do.
void ask_for_connections() {
  (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
}

/// Prints the error and ends all ranks.
int fail(Process& process, const std::exception& error) {
  if (process.bootstrap && process.bootstrap->size() > 1) comm::end_job(*process.bootstrap, error);
  std::cout.flush();
  std::cerr << (process.bootstrap ? "[rank 0] error: " : "error: ") << comm::describe(error) << std::endl;
  return static_cast<int>(comm::exit_code(error));
}

int run(int argc, char** argv) {
  ask_for_connections();
  StandardOutput output;
  Process process{argc, argv, nullptr};
  try {
    run_command_line(process);
    output.check();
    return static_cast<int>(ExitCode::kOk);
  } catch (const std::exception& error) {
    return fail(process, error);
  }
}

}  // namespace
}  // namespace minillm::app

int main(int argc, char** argv) {
  return minillm::app::run(argc, argv);
}
