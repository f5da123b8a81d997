// A job for watchdog_test.sh: every rank prints its process id, then what the argument names happens.
//   healthy   steps with progress for longer than the time limit
//   stop      rank 1 stops (SIGSTOP) while the others wait for it in a collective
//   mismatch  rank 1 calls another collective and every host thread sleeps
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <string>
#include <thread>

#include "comm/watchdog.h"
#include "core/error.h"
#include "ranks.h"

namespace {

using namespace minillm;

void run(comm::Bootstrap& job, const std::string& mode) {
  comm::Watchdog watchdog(job, {.name = "the test", .limit_s = 1, .limit = "the test's limit"});
  comm::Communicator communicator(job, {.name = "watched"});
  const comm::Watch watch(&watchdog, communicator);
  const test::DeviceArray<float> values(std::vector<float>(8, 1));
  const cuda::Stream stream;
  const auto step = [&](int64_t count) {
    communicator.all_reduce(values.data(), count, stream.get());
    stream.synchronize();
    watchdog.progress();
  };
  step(8);
  if (mode == "healthy") {
    for (int i = 0; i < 15; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      step(8);
    }
    return;
  }
  job.barrier();
  std::printf("planted at %ld\n", static_cast<long>(std::time(nullptr)));
  std::fflush(stdout);
  if (mode == "stop" && job.rank() == 1) (void)std::raise(SIGSTOP);
  step(mode == "mismatch" && job.rank() == 1 ? 4 : 8);
  for (;;) {  // asleep in something that is not a collective, but alive
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    watchdog.progress();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const auto job = comm::make_bootstrap(&argc, &argv);
  std::printf("pid %ld\n", static_cast<long>(getpid()));
  std::fflush(stdout);
  try {
    run(*job, argv[1]);
  } catch (const Error& error) {
    std::fprintf(stderr, "[rank %d] %s\n", job->rank(), error.what());
    job->abort(static_cast<int>(error.code()));
  }
  return 0;
}
