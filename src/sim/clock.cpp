#include "sim/clock.h"

#include <algorithm>
#include <utility>

namespace sim {
namespace {

// What is left of the part that an operation is in.
double& current_part(VirtualWork& left) {
  return left.latency_s > 0 ? left.latency_s : left.busy_s;
}

}  // namespace

void VirtualClock::begin(CUstream_st& stream, const VirtualWork& work) {
  const auto of_stream = [&](const InProgress& one) { return one.stream == &stream; };
  if (std::none_of(in_progress_.begin(), in_progress_.end(), of_stream))
    in_progress_.push_back({&stream, work});
}

double VirtualClock::slowdown(const InProgress& one) const {
  if (one.left.latency_s > 0) return 1;
  return static_cast<double>(
      std::count_if(in_progress_.begin(), in_progress_.end(), [&](const InProgress& other) {
        return other.left.latency_s <= 0 && other.left.resource == one.left.resource;
      }));
}

CUstream_st& VirtualClock::advance() {
  for (;;) {
    std::vector<double> slowdowns;
    for (const InProgress& one : in_progress_) slowdowns.push_back(slowdown(one));
    const auto until_change = [&](size_t i) { return current_part(in_progress_[i].left) * slowdowns[i]; };
    size_t first = 0;
    for (size_t i = 1; i < in_progress_.size(); ++i)
      if (until_change(i) < until_change(first)) first = i;
    const double step_s = until_change(first);
    now_s_ += step_s;
    for (size_t i = 0; i < in_progress_.size(); ++i) {
      double& part = current_part(in_progress_[i].left);
      part = i == first ? 0 : std::max(0.0, part - step_s / slowdowns[i]);
    }
    if (in_progress_[first].left.busy_s > 0) continue;  // only its latency is over
    const InProgress ended = in_progress_[first];
    in_progress_.erase(in_progress_.begin() + static_cast<std::ptrdiff_t>(first));
    ends_.push_back({ended.left.tag, now_s_});
    return *ended.stream;
  }
}

std::vector<VirtualEnd> VirtualClock::take_ends() {
  return std::exchange(ends_, {});
}

}  // namespace sim
