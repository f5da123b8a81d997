#include "comm/watchdog.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"

namespace minillm::comm {
namespace {
using Clock = std::chrono::steady_clock;
constexpr auto kPollInterval = std::chrono::milliseconds(100);
}  // namespace

struct Watchdog::State {
  State(Bootstrap& b, std::vector<const Communicator*> c, std::chrono::seconds t)
      : bootstrap(b), communicators(std::move(c)), timeout(t) {}

  Bootstrap& bootstrap;
  const std::vector<const Communicator*> communicators;
  const std::chrono::seconds timeout;
  std::atomic<Clock::time_point> last_progress{Clock::now()};
  std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;  ///< guarded by mutex
  std::thread thread;

  void watch() {
    std::unique_lock lock(mutex);
    while (!wake.wait_for(lock, kPollInterval, [this] { return stop; })) {
      if (const std::string cause = find_cause(); !cause.empty()) end_job(cause);
    }
  }

  std::string find_cause() const {
    for (const Communicator* communicator : communicators) {
      const std::string error = communicator->asynchronous_error();
      if (!error.empty()) return "communicator " + communicator->name() + " failed: " + error;
    }
    if (Clock::now() - last_progress.load(std::memory_order_relaxed) < timeout) return "";
    return "no progress for " + std::to_string(timeout.count()) +
           " s: another rank has stopped, or a step takes longer than the watchdog's time limit";
  }

  void end_job(const std::string& cause) const {
    std::fprintf(stderr, "[rank %d] watchdog: %s; ending all ranks\n", bootstrap.rank(), cause.c_str());
    std::fflush(stderr);
    bootstrap.abort(static_cast<int>(ExitCode::kCommunication));
  }
};

Watchdog::Watchdog(Bootstrap& bootstrap, std::vector<const Communicator*> communicators,
                   std::chrono::seconds timeout)
    : state_(std::make_unique<State>(bootstrap, std::move(communicators), timeout)) {
  state_->thread = std::thread([state = state_.get()] { state->watch(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_one();
  state_->thread.join();
}

void Watchdog::progress() {
  // Relaxed: the watchdog orders nothing between the threads that it watches.
  state_->last_progress.store(Clock::now(), std::memory_order_relaxed);
}

}  // namespace minillm::comm
