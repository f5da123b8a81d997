// What a job is doing, and how long it has been doing it without progress.
#pragma once

#include <chrono>
#include <string>

namespace minillm::comm {

/// A part of a run with a limit of its own.
struct Phase {
  std::string name;   ///< as it reads in "no progress for 600 s in …": "step 12"
  double limit_s;     ///< longest time without progress
  std::string limit;  ///< where the limit comes from, as it reads in "longer than …": "parallel.timeout_s"
};

/// Counts the time that a phase has been without progress. It has no clock and no thread: who owns it tells
/// it the time, about every kTick. Time in which nobody did that counts as two ticks, however long it was:
/// then the process was stopped, or the machine asleep, and nothing could have made progress.
class PhaseTimer {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kTick{100};

  PhaseTimer(Phase first, Clock::time_point now) : phase_(std::move(first)), last_tick_(now) {}

  /// Begins a phase, which is progress.
  void enter(Phase phase);
  void progress() { idle_ = {}; }
  void tick(Clock::time_point now);

  const Phase& phase() const { return phase_; }
  bool overdue() const { return std::chrono::duration<double>(idle_).count() >= phase_.limit_s; }
  /// What to say about an overdue phase in a job of `ranks` ranks.
  std::string complaint(int ranks) const;

 private:
  Phase phase_;
  Clock::time_point last_tick_;
  Clock::duration idle_{};
};

}  // namespace minillm::comm
