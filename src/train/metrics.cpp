#include "train/metrics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <random>

#include "core/format.h"
#include "core/output_file.h"

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

/// A NaN without its sign, which means nothing and which printf shows.
std::string number(const char* pattern, double value) {
  return std::isnan(value) ? "nan" : format(pattern, value);
}

std::string json_number(double value) {
  return std::isfinite(value) ? format("%.9g", value) : "null";
}

/// About, and of as many steps as are worth a look at the disk: a run may be meant to be stopped by hand.
constexpr int64_t kRecordBytes = 200, kMostRecords = 100'000;

std::string log_path(const std::string& directory) {
  make_folder(directory);
  return (std::filesystem::path(directory) / "metrics.jsonl").string();
}

/// "20261201T093005Z-3fa09c12": sorts by time, and differs where many runs start in a second.
std::string new_run() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 32> text{};
  (void)std::strftime(text.data(), text.size(), "%Y%m%dT%H%M%SZ", &utc);
  return text.data() + format("-%08x", std::random_device{}());
}

}  // namespace

std::string console_line(const StepMetrics& m) {
  std::string line =
      format("Step %lld | Loss: ", static_cast<long long>(m.step)) + number("%.4f", m.loss) +
      format(" | Peak VRAM/GPU: %.2f GB | %.2e s | ", static_cast<double>(m.peak_bytes) / 1e9, m.seconds) +
      short_count(m.tokens_per_second) + " tok/s/GPU | grad norm " + number("%.3g", m.gradient_norm);
  if (m.skipped)
    line += std::string(" | skipped: the ") + (std::isfinite(m.loss) ? "gradient norm" : "loss") +
            " is not finite";
  return line;
}

std::string json_line(const StepMetrics& m, const std::string& run) {
  return "{\"step\":" + std::to_string(m.step) + ",\"loss\":" + json_number(m.loss) +
         ",\"peak_vram_bytes\":" + std::to_string(m.peak_bytes) + ",\"step_s\":" + json_number(m.seconds) +
         ",\"tokens_per_s_per_gpu\":" + json_number(m.tokens_per_second) +
         ",\"grad_norm\":" + json_number(m.gradient_norm) + ",\"skipped\":" + (m.skipped ? "true" : "false") +
         ",\"run\":\"" + run + "\"}";
}

bool is_finite(const StepMetrics& m) {
  return !m.skipped && std::isfinite(m.loss) && std::isfinite(m.gradient_norm);
}

MetricsLog::MetricsLog(const std::string& directory, int64_t steps)
    : run_(new_run()), file_(log_path(directory), std::min(steps, kMostRecords) * kRecordBytes) {}

}  // namespace minillm::train
