#include "profile/report.h"

#include <algorithm>
#include <array>
#include <ostream>

#include "core/format.h"
#include "cuda/gemm_cache.h"

namespace minillm::profile {
namespace {

/// "67.14 MB": four digits, for people.
std::string quantity(double value, const char* unit) {
  constexpr std::array kPrefixes = {"", "k", "M", "G", "T", "P", "E"};
  size_t prefix = 0;
  for (; value >= 999.95 && prefix + 1 < kPrefixes.size(); ++prefix) value /= 1000;
  return format("%.4g %s%s", value, kPrefixes[prefix], unit);
}

std::string quantity(int64_t value, const char* unit) {
  return quantity(static_cast<double>(value), unit);
}

std::string counts(const std::string& name, int64_t calls, const Cost& cost) {
  const double ratio =
      cost.bytes > 0 ? static_cast<double>(cost.bytes + cost.extra_bytes) / static_cast<double>(cost.bytes)
                     : 1.0;
  return format("%-28s %5s %10s %10s %6.2f %11s", name.c_str(),
                calls > 0 ? std::to_string(calls).c_str() : "-", quantity(cost.bytes, "B").c_str(),
                quantity(cost.extra_bytes, "B").c_str(), ratio, quantity(cost.flops, "flop").c_str());
}

std::string measured(const Case& c, double seconds, const Roofline& roofline, double step) {
  const double floor = roofline.floor_s(c.cost);
  const std::string rate = roofline.memory_bound(c.cost)
                               ? format("%.1f GB/s", static_cast<double>(c.cost.bytes) / seconds * 1e-9)
                               : format("%.1f TFLOPS", static_cast<double>(c.cost.flops) / seconds * 1e-12);
  const std::string share =
      c.calls > 0 ? format("%.1f%%", 100 * seconds * static_cast<double>(c.calls) / step) : "-";
  return format(" %10.2f us %10.2f us %7.1f%% %14s %7s", seconds * 1e6, floor * 1e6, 100 * floor / seconds,
                rate.c_str(), share.c_str());
}

std::string setting(const Report& r) {
  const config::Train& train = r.config.train;
  const int64_t rows = train.micro_batch * train.seq_len;
  return format("%lld x %lld tokens per rank, ", static_cast<long long>(train.micro_batch),
                static_cast<long long>(train.seq_len)) +
         std::string(name_of(r.config.precision.param)) + ", moments " +
         std::string(name_of(r.config.precision.moments)) +
         format(", logits of %lld rows at a time, %d rank%s",
                static_cast<long long>(std::min(train.head_chunk, rows)), r.ranks, r.ranks == 1 ? "" : "s");
}

Cost step_cost(const std::vector<Case>& cases) {
  Cost sum;
  for (const Case& c : cases) {
    sum.bytes += c.calls * c.cost.bytes;
    sum.flops += c.calls * c.cost.flops;
    sum.extra_bytes += c.calls * c.cost.extra_bytes;
  }
  return sum;
}

}  // namespace

double Times::step_s(const std::vector<Case>& cases) const {
  double sum = 0;
  for (size_t i = 0; i < cases.size(); ++i) sum += static_cast<double>(cases[i].calls) * seconds[i];
  return sum;
}

void print_table(const Report& r, std::ostream& out) {
  out << setting(r) << "\n";
  const double step = r.times ? r.times->step_s(r.cases) : 0;
  if (r.times) {
    const Roofline& roofline = r.times->roofline;
    out << describe(cuda::gemm_device()) << "\n"
        << format("copy %.1f GB/s, product %.1f TFLOPS; medians of %d calls, operands in no cache\n",
                  roofline.copy_bytes_per_s * 1e-9, roofline.gemm_flops_per_s * 1e-12, r.times->repeats);
  } else {
    out << "simulated device: counts only\n";
  }
  out << format("\n%-28s %5s %10s %10s %6s %11s", "", "calls", "minimal", "extra", "ratio", "work");
  if (r.times) out << format(" %13s %13s %8s %14s %7s", "time", "floor", "of floor", "rate", "share");
  out << "\n";
  bool in_step = true;
  for (size_t i = 0; i < r.cases.size(); ++i) {
    const Case& c = r.cases[i];
    if (in_step && c.calls == 0) out << "not in a step of this configuration:\n";
    in_step = c.calls > 0;
    out << counts(c.name, c.calls, c.cost);
    if (r.times) out << measured(c, r.times->seconds[i], r.times->roofline, step);
    out << "\n";
  }
  out << counts("all listed, per step", 1, step_cost(r.cases));
  if (r.times) out << format(" %10.2f us", step * 1e6);
  out << "\n";
}

}  // namespace minillm::profile
