// Prints and logs finished steps, and tells when a run diverged.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/bootstrap.h"
#include "config/config.h"
#include "core/error.h"
#include "train/metrics.h"
#include "train/trainer.h"

namespace minillm::train {

class Reporter {
 public:
  /// Throws InputError when metrics.jsonl cannot be written in `log_dir`; empty: no log.
  Reporter(const config::Config& config, comm::Bootstrap& bootstrap, const std::string& log_dir);

  void start_clock() { last_ = Clock::now(); }
  /// The next step. Throws Error (kNumerics) after 20 steps on end without finite values, InputError where
  /// the log cannot be written.
  void report(int64_t step, const StepResult& result);
  /// After the last step. Throws Error (kNumerics) when the run ends in steps without finite values, however
  /// few: what it would publish is not what the losses before promised.
  void finish() const;

 private:
  Error diverged() const;

  using Clock = std::chrono::steady_clock;

  int64_t tokens_per_step_;
  comm::Bootstrap& bootstrap_;
  std::optional<MetricsLog> log_;
  Clock::time_point last_ = Clock::now();
  int64_t peak_bytes_ = 0;
  int64_t last_step_ = -1;
  int64_t bad_steps_ = 0;  ///< the last ones, without finite values
};

}  // namespace minillm::train
