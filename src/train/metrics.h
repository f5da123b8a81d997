// What a run says about each step: the console line and metrics.jsonl.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

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
/// "grad_norm":…,"skipped":false}. A value that is not finite becomes null: JSON has no NaN.
std::string json_line(const StepMetrics& metrics);

/// Appends json_line()s to `directory`/metrics.jsonl, each flushed, so that a run can be watched.
class MetricsLog {
 public:
  /// Starts a new file. Throws InputError naming the path when it cannot be written.
  explicit MetricsLog(const std::string& directory);
  void append(const StepMetrics& metrics);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace minillm::train
