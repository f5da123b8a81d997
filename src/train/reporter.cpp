#include "train/reporter.h"

#include <algorithm>
#include <iostream>

#include "cuda/memory.h"

namespace minillm::train {
namespace {

/// A run with this many steps on end has diverged for good.
constexpr int64_t kMostBadSteps = 20;

}  // namespace

Reporter::Reporter(const config::Config& config, comm::Bootstrap& bootstrap, const std::string& log_dir)
    : tokens_per_step_(config.train.grad_accumulation * config.train.micro_batch * config.train.seq_len),
      bootstrap_(bootstrap) {
  if (log_dir.empty() || bootstrap.rank() != 0) return;
  const int64_t steps = config.train.steps;
  log_.emplace(log_dir, config.train.stop_after > 0 ? std::min(config.train.stop_after, steps) : steps);
  if (const std::string& weakness = log_->lock().weakness(); !weakness.empty()) std::cout << weakness << "\n";
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
  last_step_ = step;
  bad_steps_ = is_finite(metrics) ? 0 : bad_steps_ + 1;
  if (bad_steps_ == kMostBadSteps) throw diverged();
}

void Reporter::finish() const {
  if (bad_steps_ > 0) throw diverged();
}

Error Reporter::diverged() const {
  const int64_t first = last_step_ - bad_steps_ + 1;
  std::string text = "training ended without finite values: the loss or the gradient norm was not finite in ";
  text += bad_steps_ == 1 ? "the last step, " + std::to_string(first)
                          : "the last " + std::to_string(bad_steps_) + " steps, " + std::to_string(first) +
                                " to " + std::to_string(last_step_);
  text += ". No weights are saved. Lower train.optimizer.lr or set train.grad_clip";
  if (first > 0) text += ", or end before with train.stop_after=" + std::to_string(first);
  return {ExitCode::kNumerics, text};
}

}  // namespace minillm::train
