#include "sim/counters.h"

#include <algorithm>
#include <mutex>

#include "sim/sanitizer.h"

namespace sim {
namespace {

struct State {
  std::mutex mutex;
  Counters counters;
};
State& state() {
  static auto* const state = new State;  // outlives all threads
  return *state;
}

template <class Update>
auto with_counters(Update update) {
  const InvisibleScope invisible;
  std::lock_guard lock(state().mutex);
  return update(state().counters);
}

}  // namespace

Counters counters() {
  return with_counters([](const Counters& counters) { return counters; });
}

void reset_counters() {
  with_counters([](Counters& counters) {
    const int64_t now = counters.allocated_bytes;
    counters = Counters{.allocated_bytes = now, .peak_bytes = now};
  });
}

void count_launch(const std::string& kernel) {
  with_counters([&](Counters& counters) { ++counters.launches[kernel]; });
}

void count_collective(const std::string& name, int64_t bytes) {
  with_counters([&](Counters& counters) {
    CollectiveCount& count = counters.collectives[name];
    ++count.calls;
    count.bytes += bytes;
  });
}

void count_collective_group() {
  with_counters([](Counters& counters) { ++counters.collective_groups; });
}

void record_communicator(const std::string& name, const CommunicatorConfig& config) {
  with_counters([&](Counters& counters) { counters.communicators[name] = config; });
}

void count_window(const std::string& communicator) {
  with_counters([&](Counters& counters) { ++counters.windows[communicator]; });
}

void count_memory(int64_t bytes) {
  with_counters([&](Counters& counters) {
    counters.allocated_bytes += bytes;
    counters.peak_bytes = std::max(counters.peak_bytes, counters.allocated_bytes);
  });
}

void count_allocation() {
  with_counters([](Counters& counters) { ++counters.allocations; });
}

void count_object() {
  with_counters([](Counters& counters) { ++counters.objects; });
}

void count_node_priority_graph() {
  with_counters([](Counters& counters) { ++counters.node_priority_graphs; });
}

void count_host_wait() {
  with_counters([](Counters& counters) { ++counters.host_waits; });
}

}  // namespace sim
