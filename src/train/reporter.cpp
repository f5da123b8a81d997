#include "train/reporter.h"

#include <cmath>
#include <iostream>

#include "core/error.h"
#include "cuda/memory.h"
#include "train/weights.h"

namespace minillm::train {
namespace {

/// A run that skips this many steps on end has diverged for good.
constexpr int64_t kMaxSkippedSteps = 20;

}  // namespace

Reporter::Reporter(const config::Config& config, comm::Bootstrap& bootstrap, const std::string& log_dir)
    : tokens_per_step_(config.train.grad_accumulation * config.train.micro_batch * config.train.seq_len),
      bootstrap_(bootstrap) {
  if (!log_dir.empty() && bootstrap.rank() == 0) {
    prepare_directory(log_dir);
    log_.emplace(log_dir);
  }
}

void Reporter::report(int64_t step, const StepResult& result) {
  if (peak_bytes_ == 0)
    peak_bytes_ = bootstrap_.max(cuda::device_bytes_peak());  // nothing is allocated later
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_).count();
  last_ = now;
  const StepMetrics metrics{.step = step,
                            .loss = result.loss,
                            .peak_bytes = peak_bytes_,
                            .seconds = seconds,
                            .tokens_per_second = static_cast<double>(tokens_per_step_) / seconds,
                            .gradient_norm = result.gradient_norm,
                            .skipped = result.skipped};
  if (bootstrap_.rank() == 0) std::cout << console_line(metrics) << std::endl;
  if (log_) log_->append(metrics);
  skipped_ = result.skipped || !std::isfinite(result.gradient_norm) ? skipped_ + 1 : 0;
  if (skipped_ == kMaxSkippedSteps)
    throw Error(ExitCode::kNumerics, "the gradient norm was not finite in " + std::to_string(skipped_) +
                                         " steps on end, the last is step " + std::to_string(step) +
                                         ": lower train.optimizer.lr or set train.grad_clip");
}

}  // namespace minillm::train
