#include "shard/lifetimes.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace minillm::shard {
namespace {

Positions nowhere() {
  Positions positions;
  positions.fill(kNoPosition);
  return positions;
}

void join(Positions& into, const Positions& other) {
  for (int stream = 0; stream < kStreamCount; ++stream) into[stream] = std::max(into[stream], other[stream]);
}

// What is known of a life while its accesses are collected.
struct Extent {
  Positions first = nowhere();
  Positions last = nowhere();
  int begin = std::numeric_limits<int>::max();
  bool begins_with_read = false;
  bool handed_over = false;

  void add(int position, int stream, bool writes) {
    first[stream] = first[stream] == kNoPosition ? position : std::min(first[stream], position);
    last[stream] = std::max(last[stream], position);
    // An operation that reads and writes is known by its write: it may do so by part.
    if (position < begin || (position == begin && writes)) begins_with_read = !writes;
    begin = std::min(begin, position);
  }

  void move(int distance) {
    begin += distance;
    for (Positions* positions : {&first, &last})
      for (int& position : *positions)
        if (position != kNoPosition) position += distance;
  }
};

std::vector<Extent> extents(const Schedule& schedule, const std::vector<std::vector<Touch>>& touches,
                            int pieces) {
  const int count = static_cast<int>(schedule.operations.size());
  std::vector<Extent> found(pieces);
  for (int i = 0; i < count; ++i) {
    const Operation& operation = schedule.operations[i];
    for (const Touch& touch : touches[i]) {
      Extent& extent = found[touch.piece];
      extent.add(operation.next_step ? i : count + i, static_cast<int>(operation.stream), touch.writes);
      extent.handed_over |= operation.next_step;
    }
  }
  for (Extent& extent : found) {
    if (extent.handed_over && extent.begins_with_read)
      throw InternalError(
          "plan_memory: '" + describe(schedule.operations[extent.begin % count], {}) +
          "' reads a piece that no operation for the same step wrote before it; operations that write "
          "it for the next step have to be marked next_step too");
    if (extent.begin < count) extent.move(count);
  }
  return found;
}

// Whether every access to `a` is done before any to `b`, whose life is moved `later` positions on.
bool all_before(const Life& a, const Life& b, int later) {
  for (int stream = 0; stream < kStreamCount; ++stream)
    if (a.last_access[stream] > b.done_before[stream] + later) return false;
  return true;
}

// Whether the operation at `position` or one that is done before it is an access of the life.
bool has_begun(const Life& life, int position, int stream, const Positions& done) {
  for (int s = 0; s < kStreamCount; ++s)
    if (life.first_access[s] != kNoPosition && life.first_access[s] <= (s == stream ? position : done[s]))
      return true;
  return false;
}

bool is_over(const Life& life, const Positions& done) {
  for (int s = 0; s < kStreamCount; ++s)
    if (life.last_access[s] > done[s]) return false;
  return true;
}

}  // namespace

StepOrder order_of(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits) {
  const int count = static_cast<int>(schedule.operations.size());
  check_waits("plan_memory", schedule, waits);
  StepOrder order{count, {}, std::vector<Positions>(static_cast<size_t>(3) * count)};
  for (const Operation& operation : schedule.operations) order.stream.push_back(operation.stream);
  std::array<Positions, kStreamCount> of_stream;
  for (Positions& positions : of_stream) positions.fill(kNoPosition);
  const auto stream_at = [&](int position) { return static_cast<int>(order.stream[position % count]); };
  for (int position = 0; position < 3 * count; ++position) {
    const int operation = position % count;
    Positions& done = of_stream[stream_at(position)];
    for (const Wait& wait : waits[operation]) {
      const int other = position - operation + wait.operation - wait.steps_back * count;
      if (other < 0) continue;
      join(done, order.done_before[other]);
      done[stream_at(other)] = std::max(done[stream_at(other)], other);
    }
    order.done_before[position] = done;
    done[stream_at(position)] = position;
  }
  return order;
}

std::vector<std::optional<Life>> find_lives(const Schedule& schedule, const StepOrder& order,
                                            const std::vector<std::vector<Touch>>& touches, int pieces) {
  std::vector<std::optional<Life>> lives;
  for (const Extent& extent : extents(schedule, touches, pieces)) {
    std::optional<Life>& life = lives.emplace_back();
    if (extent.begin == std::numeric_limits<int>::max()) continue;
    life.emplace(Life{extent.begin, *std::max_element(extent.last.begin(), extent.last.end()), extent.first,
                      extent.last});
    // Nothing orders a life's first accesses on different streams: only what all of them find done is done.
    life->done_before.fill(std::numeric_limits<int>::max());
    for (int first : extent.first) {
      if (first == kNoPosition) continue;
      for (int stream = 0; stream < kStreamCount; ++stream)
        life->done_before[stream] = std::min(life->done_before[stream], order.done_before[first][stream]);
    }
  }
  return lives;
}

bool may_share(const Life& a, const Life& b, const StepOrder& order) {
  // Order implies position, and both lives begin in the same step: only the one that begins first can be
  // first.
  const Life& first = a.first < b.first ? a : b;
  const Life& second = a.first < b.first ? b : a;
  return first.last < second.first && second.last < first.first + order.operations &&
         all_before(first, second, 0) && all_before(second, first, order.operations);
}

int64_t live_bytes(const std::vector<Life>& lives, const std::vector<int64_t>& bytes,
                   const StepOrder& order) {
  int64_t most = 0;
  for (int stream = 0; stream < kStreamCount; ++stream) {
    std::vector<int> positions;  // of the stream's operations, in the two steps that lives begin and end in
    for (int at = order.operations; at < 3 * order.operations; ++at)
      if (static_cast<int>(order.stream[at % order.operations]) == stream) positions.push_back(at);
    const auto count = static_cast<std::ptrdiff_t>(positions.size() / 2);
    std::vector<int64_t> change(static_cast<size_t>(count) + 1);
    for (size_t i = 0; i < lives.size(); ++i) {
      // Along a stream a life begins once and is over once.
      const auto begin = std::partition_point(positions.begin(), positions.end(), [&](int at) {
        return !has_begun(lives[i], at, stream, order.done_before[at]);
      });
      const auto end = std::partition_point(
          begin, positions.end(), [&](int at) { return !is_over(lives[i], order.done_before[at]); });
      if (begin == end) continue;
      const std::ptrdiff_t first = (begin - positions.begin()) % count;
      const std::ptrdiff_t last = first + std::min(end - begin, count) - 1;
      change[first] += bytes[i];
      change[last % count + 1] -= bytes[i];
      if (last >= count) change[0] += bytes[i];
    }
    int64_t live = 0;
    for (int64_t each : change) most = std::max(most, live += each);
  }
  return most;
}

}  // namespace minillm::shard
