// A job for watchdog_test.sh: every rank prints its process id, then what the argument names happens.
//   healthy   steps with progress for longer than the time limit
//   pause     all ranks stop (SIGSTOP) until somebody lets them go on, longer than the time limit
//   stop      rank 1 stops while the others wait for it in a collective
//   mismatch  rank 1 calls another collective and every host thread sleeps
// and what NCCL waits for without end: rank 1 stays away, with progress of its own,
//   init      while the others make a communicator
//   register  being refused a window that the others register
//   destroy   while the others destroy their communicator
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <memory>
#include <string>
#include <thread>

#include "comm/watchdog.h"
#include "core/error.h"
#include "ranks.h"
#include "raw_communicator.h"

namespace {

using namespace minillm;

void plant(comm::Bootstrap& job) {
  job.barrier();
  std::printf("planted at %ld\n", static_cast<long>(std::time(nullptr)));
  std::fflush(stdout);
}

/// Asleep in something that is not a collective, but alive.
[[noreturn]] void stay_away(comm::Watchdog& watchdog) {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    watchdog.progress();
  }
}

void steps(comm::Bootstrap& job, comm::Watchdog& watchdog, const std::string& mode) {
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
  plant(job);
  if (mode == "pause") {
    (void)std::raise(SIGSTOP);
    return step(8);
  }
  if (mode == "stop" && job.rank() == 1) (void)std::raise(SIGSTOP);
  step(mode == "mismatch" && job.rank() == 1 ? 4 : 8);
  stay_away(watchdog);
}

void make_with_one_away(comm::Bootstrap& job, comm::Watchdog& watchdog) {
  plant(job);
  if (job.rank() == 1) stay_away(watchdog);
  const test::RawCommunicator communicator;
}

void register_with_one_refused(comm::Bootstrap& job, comm::Watchdog& watchdog) {
  constexpr size_t kBytes = 1 << 16;
  const test::RawCommunicator communicator;
  void* memory = nullptr;
  EXPECT_EQ(ncclMemAlloc(&memory, kBytes), ncclSuccess);
  plant(job);
  ncclWindow_t window = nullptr;
  const int skew = job.rank() == 1 ? 1 : 0;  // windows begin at pages
  EXPECT_EQ(ncclCommWindowRegister(communicator.get(), static_cast<char*>(memory) + skew, kBytes - 4096,
                                   &window, NCCL_WIN_COLL_SYMMETRIC),
            skew ? ncclInvalidArgument : ncclSuccess);
  stay_away(watchdog);
}

void destroy_with_one_away(comm::Bootstrap& job, comm::Watchdog& watchdog) {
  comm::Communicator communicator(job, {.name = "watched"});
  plant(job);
  if (job.rank() == 1) stay_away(watchdog);
}

void run(comm::Bootstrap& job, const std::string& mode) {
  comm::Watchdog watchdog(job, {.name = "the test", .limit_s = 1, .limit = "the test's limit"});
  if (mode == "init") return make_with_one_away(job, watchdog);
  if (mode == "register") return register_with_one_refused(job, watchdog);
  if (mode == "destroy") return destroy_with_one_away(job, watchdog);
  return steps(job, watchdog, mode);
}

}  // namespace

int main(int argc, char** argv) {
  const auto job = comm::make_bootstrap(&argc, &argv);
  test::job() = job.get();
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
