#include "train/metrics.h"

#include <cmath>
#include <filesystem>

#include "core/error.h"
#include "core/format.h"

namespace minillm::train {
namespace {

/// 62.5k, 1.25M: three digits, for people.
std::string short_count(double value) {
  const char* suffix = "";
  for (const char* next : {"k", "M", "G"}) {
    if (value < 999.5) break;
    value /= 1000;
    suffix = next;
  }
  return format("%.3g", value) + suffix;
}

std::string json_number(double value) {
  return std::isfinite(value) ? format("%.9g", value) : "null";
}

}  // namespace

std::string console_line(const StepMetrics& m) {
  std::string line =
      format("Step %lld | Loss: %.4f | Peak VRAM/GPU: %.2f GB | %.2e s | ", static_cast<long long>(m.step),
             m.loss, static_cast<double>(m.peak_bytes) / 1e9, m.seconds) +
      short_count(m.tokens_per_second) + " tok/s/GPU | " + format("grad norm %.3g", m.gradient_norm);
  if (m.skipped) line += " | skipped: the gradient norm is not finite";
  return line;
}

std::string json_line(const StepMetrics& m) {
  return "{\"step\":" + std::to_string(m.step) + ",\"loss\":" + json_number(m.loss) +
         ",\"peak_vram_bytes\":" + std::to_string(m.peak_bytes) + ",\"step_s\":" + json_number(m.seconds) +
         ",\"tokens_per_s_per_gpu\":" + json_number(m.tokens_per_second) +
         ",\"grad_norm\":" + json_number(m.gradient_norm) + ",\"skipped\":" + (m.skipped ? "true" : "false") +
         "}";
}

MetricsLog::MetricsLog(const std::string& directory)
    : path_((std::filesystem::path(directory) / "metrics.jsonl").string()), file_(path_) {
  if (!file_) throw InputError(path_ + ": cannot be written");
}

void MetricsLog::append(const StepMetrics& metrics) {
  file_ << json_line(metrics) << std::endl;
  if (!file_) throw InputError(path_ + ": writing failed, the disk may be full");
}

}  // namespace minillm::train
