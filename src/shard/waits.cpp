#include "shard/waits.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string>

#include "core/error.h"

namespace minillm::shard {
namespace {

// By stream, the last operation (its place in the unrolled list) known to be done. Streams run in order, so
// all earlier ones of that stream are done too.
using Clock = std::array<int, kStreamCount>;
constexpr Clock kNothingDone = [] {
  Clock clock{};
  clock.fill(-1);
  return clock;
}();

struct LastAccess {
  Clock read = kNothingDone;
  Clock write = kNothingDone;
};

int index_of(StreamId stream) {
  return static_cast<int>(stream);
}

void join(Clock& clock, const Clock& other) {
  for (int stream = 0; stream < kStreamCount; ++stream)
    clock[stream] = std::max(clock[stream], other[stream]);
}

// The last conflicting operation of each stream and region, latest first.
std::vector<int> conflicting(const Operation& operation, std::map<Region, LastAccess>& accesses) {
  std::vector<int> found;
  const auto add = [&](const Clock& last) { found.insert(found.end(), last.begin(), last.end()); };
  for (const Region& region : operation.reads) add(accesses[region].write);
  for (const Region& region : operation.writes) {
    add(accesses[region].read);
    add(accesses[region].write);
  }
  std::sort(found.begin(), found.end(), std::greater<>());
  return found;
}

}  // namespace

std::vector<std::vector<Wait>> derive_waits(const Schedule& schedule) {
  const std::vector<Operation>& operations = schedule.operations;
  const int count = static_cast<int>(operations.size());
  std::vector<std::vector<Wait>> waits(operations.size());
  std::map<Region, LastAccess> accesses;
  std::vector<Clock> done(2 * operations.size());
  std::array<Clock, kStreamCount> of_stream;
  of_stream.fill(kNothingDone);

  // The second of two copies is the steady state: an operation two steps back is followed on its stream by
  // its own copy one step back, and whatever orders two operations lies between them in the list.
  for (int i = 0; i < 2 * count; ++i) {
    const Operation& operation = operations[i % count];
    const int stream = index_of(operation.stream);
    Clock known = of_stream[stream];
    // Latest first, since only a later operation's wait can imply that for an earlier one.
    for (int other : conflicting(operation, accesses)) {
      if (other < 0 || known[index_of(operations[other % count].stream)] >= other) continue;
      join(known, done[other]);
      if (i >= count) waits[i - count].push_back({other % count, other < count ? 1 : 0});
    }
    known[stream] = i;
    done[i] = of_stream[stream] = known;
    for (const Region& region : operation.reads) accesses[region].read[stream] = i;
    for (const Region& region : operation.writes) accesses[region].write[stream] = i;
  }
  return waits;
}

void check_waits(const char* who, const Schedule& schedule, const std::vector<std::vector<Wait>>& waits) {
  const int count = static_cast<int>(schedule.operations.size());
  if (waits.size() != schedule.operations.size())
    throw InternalError(std::string(who) + ": waits for " + std::to_string(waits.size()) +
                        " operations, but the schedule has " + std::to_string(count) +
                        "; pass derive_waits of this schedule");
  for (int i = 0; i < count; ++i)
    for (const Wait& wait : waits[i]) {
      const bool issued = wait.steps_back == 1 || (wait.steps_back == 0 && wait.operation < i);
      if (wait.operation < 0 || wait.operation >= count || !issued)
        throw InternalError(std::string(who) + ": operation " + std::to_string(i) + " waits for operation " +
                            std::to_string(wait.operation) + ", " + std::to_string(wait.steps_back) +
                            " steps back, which is not issued before it");
    }
}

}  // namespace minillm::shard
