// Prints and logs finished steps, and gives up on runs that diverged.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "comm/bootstrap.h"
#include "config/config.h"
#include "train/metrics.h"
#include "train/trainer.h"

namespace minillm::train {

class Reporter {
 public:
  Reporter(const config::Config& config, comm::Bootstrap& bootstrap, const std::string& log_dir);

  void start_clock() { last_ = Clock::now(); }
  void report(int64_t step, const StepResult& result);

 private:
  using Clock = std::chrono::steady_clock;

  int64_t tokens_per_step_;
  comm::Bootstrap& bootstrap_;
  std::optional<MetricsLog> log_;
  Clock::time_point last_ = Clock::now();
  int64_t peak_bytes_ = 0;
  int64_t skipped_ = 0;
};

}  // namespace minillm::train
