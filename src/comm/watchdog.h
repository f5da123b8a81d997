// Ends the job when a collective fails or the steps stop coming: a broken rank must not leave the others
// hanging.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/communicator.h"

namespace minillm::comm {

/// Polls the communicators ten times a second on a thread of its own. On an asynchronous error, or when
/// progress() was not called for `timeout`, it prints the cause with the rank and calls bootstrap.abort(86).
class Watchdog {
 public:
  /// The communicators and the bootstrap outlive this object.
  Watchdog(Bootstrap& bootstrap, std::vector<const Communicator*> communicators,
           std::chrono::seconds timeout);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Tells that the job is alive.
  void progress();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace minillm::comm
