// Ends the job when a collective fails or progress stops: a broken rank must not leave the others hanging.
#pragma once

#include <memory>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/phase.h"

namespace minillm::comm {

/// Looks ten times a second, on a thread of its own. On an asynchronous error of a communicator that it
/// watches, or when the phase that was entered last has been without progress for its limit, it prints the
/// cause with the rank and calls bootstrap.abort(86). It is made as soon as there is a bootstrap, before
/// anything that waits for other ranks. Its methods may be called from any thread.
class Watchdog {
 public:
  /// The bootstrap outlives this object.
  Watchdog(Bootstrap& bootstrap, Phase first);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Begins a phase, which is progress.
  void enter(Phase phase);
  Phase phase() const;
  /// Tells that the job is alive.
  void progress();

  /// Polls `communicator` from now on.
  void watch(const Communicator& communicator);
  /// Ends that. Does not return while it is polled, so that it may be destroyed.
  void forget(const Communicator& communicator);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A phase within another, which goes on afterwards with a new count. Does nothing without a watchdog.
class InnerPhase {
 public:
  InnerPhase(Watchdog* watchdog, Phase phase);
  ~InnerPhase();
  InnerPhase(const InnerPhase&) = delete;
  InnerPhase& operator=(const InnerPhase&) = delete;

 private:
  Watchdog* watchdog_;
  Phase outer_ = {};
};

/// A communicator under a watchdog: dies before the communicator. Does nothing without a watchdog.
class Watch {
 public:
  Watch(Watchdog* watchdog, const Communicator& communicator);
  ~Watch();
  Watch(Watch&& other) noexcept;
  Watch& operator=(Watch&&) = delete;

 private:
  Watchdog* watchdog_;
  const Communicator* communicator_;
};

}  // namespace minillm::comm
