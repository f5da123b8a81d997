// What a run says about each step: the console line and metrics.jsonl.
#pragma once

#include <cstdint>
#include <string>

#include "core/log_file.h"

namespace minillm::train {

struct StepMetrics {
  int64_t step = 0;
  double loss = 0;
  int64_t peak_bytes = 0;        ///< device memory, maximum over ranks
  double seconds = 0;            ///< from the end of the step before
  double tokens_per_second = 0;  ///< per rank
  double gradient_norm = 0;
  bool skipped = false;
};

/// "Step 0 | Loss: 10.6512 | Peak VRAM/GPU: 6.51 GB | 1.31e-01 s | 62.5k tok/s/GPU | grad norm 3.21". The
/// part up to GB is fixed: other programs parse it. GB is 1e9 bytes.
std::string console_line(const StepMetrics& metrics);

/// One JSON object, SI units: {"step":0,"loss":…,"peak_vram_bytes":…,"step_s":…,"tokens_per_s_per_gpu":…,
/// "grad_norm":…,"skipped":false,"run":"…"}. A value that is not finite becomes null: JSON has no NaN.
std::string json_line(const StepMetrics& metrics, const std::string& run);

/// Whether a step gave numbers that one can go on with.
bool is_finite(const StepMetrics& metrics);

/// Appends json_line()s to `directory`/metrics.jsonl, beside those of earlier runs, so that a run can be
/// watched. The name of a run is the time of its start in UTC and eight random digits.
class MetricsLog {
 public:
  /// Makes the folder, and checks that there is room for `steps` records. Throws InputError naming the path
  /// when it cannot be written, or the run that is writing it.
  MetricsLog(const std::string& directory, int64_t steps);
  /// Throws InputError.
  void append(const StepMetrics& metrics) { file_.append(json_line(metrics, run_)); }

  const FileLock& lock() const { return file_.lock(); }

 private:
  std::string run_;
  LogFile file_;
};

}  // namespace minillm::train
