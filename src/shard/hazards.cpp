#include "shard/hazards.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "core/error.h"

namespace minillm::shard {
namespace {

constexpr int kSteps = 3;

// How many operations of each stream have finished, as far as the holder of the clock can know.
using Times = std::vector<int>;

struct Instant {
  Times seen;    // finished before this operation starts
  int time = 0;  // this operation is the time-th of its stream, counted from 1
};

struct Access {
  int step = 0;
  int operation = 0;
  bool writes = false;
};

class Replay {
 public:
  Replay(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits)
      : schedule_(schedule), count_(static_cast<int>(schedule.operations.size())) {
    if (waits.size() != schedule.operations.size())
      throw InternalError("find_hazards: waits for " + std::to_string(waits.size()) +
                          " operations, but the " + "schedule has " + std::to_string(count_));
    std::vector<Times> streams(kStreamCount, Times(kStreamCount, 0));
    for (int step = 0; step < kSteps; ++step)
      for (int operation = 0; operation < count_; ++operation) {
        Times& clock = streams[stream_of(operation)];
        for (const Wait& wait : waits[operation]) receive(clock, step, operation, wait);
        const int time = clock[stream_of(operation)] + 1;
        instants_.push_back({clock, time});
        clock[stream_of(operation)] = time;
        note_accesses(step, operation);
      }
  }

  std::vector<Hazard> hazards() const {
    std::set<std::tuple<int, int, int, Region>> found;
    for (const auto& [region, accesses] : accesses_)
      for (const Access& second : accesses) {
        if (second.step != kSteps - 1) continue;
        for (const Access& first : accesses) {
          if (!issued_before(first, second) || second.step - first.step > 1) continue;
          if ((first.writes || second.writes) && !ordered(first, second))
            found.emplace(second.operation, first.operation, second.step - first.step, region);
        }
      }
    std::vector<Hazard> list;
    for (const auto& [second, first, steps_back, region] : found)
      list.push_back({first, second, steps_back, region});
    return list;
  }

 private:
  int stream_of(int operation) const { return static_cast<int>(schedule_.operations[operation].stream); }
  const Instant& instant(int step, int operation) const { return instants_[step * count_ + operation]; }

  void receive(Times& clock, int step, int operation, const Wait& wait) const {
    const bool issued = wait.steps_back == 1 || (wait.steps_back == 0 && wait.operation < operation);
    if (wait.operation < 0 || wait.operation >= count_ || !issued)
      throw InternalError("find_hazards: operation " + std::to_string(operation) + " waits for operation " +
                          std::to_string(wait.operation) + ", " + std::to_string(wait.steps_back) +
                          " steps back, which is not issued before it");
    if (step < wait.steps_back) return;
    const Instant& sender = instant(step - wait.steps_back, wait.operation);
    for (int stream = 0; stream < kStreamCount; ++stream)
      clock[stream] = std::max(clock[stream], sender.seen[stream]);
    int& own = clock[stream_of(wait.operation)];
    own = std::max(own, sender.time);
  }

  void note_accesses(int step, int operation) {
    for (const Region& region : schedule_.operations[operation].reads)
      accesses_[region].push_back({step, operation, false});
    for (const Region& region : schedule_.operations[operation].writes)
      accesses_[region].push_back({step, operation, true});
  }

  static bool issued_before(const Access& a, const Access& b) {
    return std::tie(a.step, a.operation) < std::tie(b.step, b.operation);
  }

  bool ordered(const Access& first, const Access& second) const {
    return instant(second.step, second.operation).seen[stream_of(first.operation)] >=
           instant(first.step, first.operation).time;
  }

  const Schedule& schedule_;
  int count_ = 0;
  std::vector<Instant> instants_;
  std::map<Region, std::vector<Access>> accesses_;
};

}  // namespace

std::vector<Hazard> find_hazards(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits) {
  return Replay(schedule, waits).hazards();
}

std::string describe(const Hazard& hazard, const Schedule& schedule,
                     const std::vector<std::string>& unit_names) {
  const Operation& first = schedule.operations[hazard.first];
  const Operation& second = schedule.operations[hazard.second];
  const auto quoted = [&](const Operation& operation) {
    std::string text = "'";
    return text.append(describe(operation, unit_names)).append("' on the ").append(name_of(operation.stream));
  };
  return describe(hazard.region, unit_names) + ": " + quoted(second) + " stream does not wait for " +
         quoted(first) + " stream" + (hazard.steps_back > 0 ? " of the step before" : "");
}

}  // namespace minillm::shard
