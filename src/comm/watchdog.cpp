#include "comm/watchdog.h"

#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"

namespace minillm::comm {

struct Watchdog::State {
  State(Bootstrap& b, Phase first) : bootstrap(b), timer(std::move(first), PhaseTimer::Clock::now()) {}

  Bootstrap& bootstrap;
  std::mutex mutex;  ///< of all that follows
  PhaseTimer timer;
  std::vector<const Communicator*> communicators;
  std::condition_variable wake;
  bool stop = false;
  std::thread thread;

  void run() {
    std::unique_lock lock(mutex);
    while (!wake.wait_for(lock, PhaseTimer::kTick, [this] { return stop; })) {
      timer.tick(PhaseTimer::Clock::now());
      if (const std::string cause = find_cause(); !cause.empty()) end_job(cause);
    }
  }

  std::string find_cause() const {
    for (const Communicator* communicator : communicators) {
      const std::string error = communicator->asynchronous_error();
      if (!error.empty()) return "communicator " + communicator->name() + " failed: " + error;
    }
    return timer.overdue() ? timer.complaint(bootstrap.size()) : "";
  }

  /// Keeps the lock: whoever comes to enter a phase now is too late.
  void end_job(const std::string& cause) const {
    std::fprintf(stderr, "[rank %d] watchdog: %s; ending %s\n", bootstrap.rank(), cause.c_str(),
                 bootstrap.size() > 1 ? "all ranks" : "the run");
    std::fflush(stderr);
    bootstrap.abort(static_cast<int>(ExitCode::kCommunication));
  }
};

Watchdog::Watchdog(Bootstrap& bootstrap, Phase first)
    : state_(std::make_unique<State>(bootstrap, std::move(first))) {
  state_->thread = std::thread([state = state_.get()] { state->run(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_one();
  state_->thread.join();
}

void Watchdog::enter(Phase phase) {
  const std::lock_guard lock(state_->mutex);
  state_->timer.enter(std::move(phase));
}

Phase Watchdog::phase() const {
  const std::lock_guard lock(state_->mutex);
  return state_->timer.phase();
}

void Watchdog::progress() {
  const std::lock_guard lock(state_->mutex);
  state_->timer.progress();
}

void Watchdog::watch(const Communicator& communicator) {
  const std::lock_guard lock(state_->mutex);
  state_->communicators.push_back(&communicator);
}

void Watchdog::forget(const Communicator& communicator) {
  const std::lock_guard lock(state_->mutex);
  std::erase(state_->communicators, &communicator);
}

InnerPhase::InnerPhase(Watchdog* watchdog, Phase phase) : watchdog_(watchdog) {
  if (watchdog_ == nullptr) return;
  outer_ = watchdog_->phase();
  watchdog_->enter(std::move(phase));
}

InnerPhase::~InnerPhase() {
  if (watchdog_ != nullptr) watchdog_->enter(std::move(outer_));
}

Watch::Watch(Watchdog* watchdog, const Communicator& communicator)
    : watchdog_(watchdog), communicator_(&communicator) {
  if (watchdog_ != nullptr) watchdog_->watch(communicator);
}

Watch::~Watch() {
  if (watchdog_ != nullptr) watchdog_->forget(*communicator_);
}

Watch::Watch(Watch&& other) noexcept
    : watchdog_(std::exchange(other.watchdog_, nullptr)), communicator_(other.communicator_) {}

}  // namespace minillm::comm
