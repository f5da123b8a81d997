#include "stream_replay.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <random>

namespace minillm::shard {
namespace {

constexpr int kCommunicators = 3;

class Replay {
 public:
  Replay(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits, int steps, int ranks,
         unsigned seed)
      : schedule_(schedule),
        waits_(waits),
        count_(static_cast<int>(schedule.operations.size())),
        random_(seed),
        ranks_(static_cast<size_t>(ranks)) {
    std::map<Region, int> writer;
    for (int time = 0; time < steps * count_; ++time) {
      const Operation& op = operation(time);
      found_in_order_.push_back(find_writers(op, writer));
      for (const Region& region : op.writes) writer[region] = time;
      for (Rank& rank : ranks_) {
        rank.queues[static_cast<size_t>(op.stream)].push_back(time);
        for (int communicator : communicators_of(op, schedule_))
          rank.collectives[communicator].push_back(time);
      }
    }
    for (Rank& rank : ranks_) rank.done.assign(found_in_order_.size(), false);
  }

  std::string run() {
    for (;;) {
      std::vector<Choice> choices = possible();
      if (choices.empty()) return end();
      const Choice chosen = choices[random_() % choices.size()];
      for (Rank& rank : ranks_) {
        if (&rank != &ranks_[chosen.rank] && !is_collective(operation(chosen.time).kind)) continue;
        execute(rank, chosen.time);
        if (!fault_.empty()) return fault_;
      }
    }
  }

 private:
  struct Rank {
    std::array<std::deque<int>, kStreamCount> queues;
    std::array<std::deque<int>, kCommunicators> collectives;
    std::vector<bool> done;
    std::map<Region, int> writer;
  };
  struct Choice {
    size_t rank;
    int time;
  };

  // Operations of all steps are numbered in the order of issue.
  const Operation& operation(int time) const {
    return schedule_.operations[static_cast<size_t>(time % count_)];
  }

  std::string quoted(int time) const {
    return std::string("'")
        .append(describe(operation(time), {}))
        .append("' of step ")
        .append(std::to_string(time / count_));
  }

  // Who wrote what the operation touches, -1: nobody.
  static std::vector<int> find_writers(const Operation& op, const std::map<Region, int>& writer) {
    std::vector<int> found;
    for (const std::vector<Region>* regions : {&op.reads, &op.writes})
      for (const Region& region : *regions) {
        const auto last = writer.find(region);
        found.push_back(last == writer.end() ? -1 : last->second);
      }
    return found;
  }

  bool can_start(const Rank& rank, int time) const {
    const Operation& op = operation(time);
    const auto is_next = [&](const std::deque<int>& queue) {
      return !queue.empty() && queue.front() == time;
    };
    if (!is_next(rank.queues[static_cast<size_t>(op.stream)])) return false;
    for (int communicator : communicators_of(op, schedule_))
      if (!is_next(rank.collectives[static_cast<size_t>(communicator)])) return false;
    const auto is_met = [&](const Wait& wait) {
      const int awaited = (time / count_ - wait.steps_back) * count_ + wait.operation;
      return awaited < 0 || rank.done[static_cast<size_t>(awaited)];
    };
    const auto& waits = waits_[static_cast<size_t>(time % count_)];
    return std::all_of(waits.begin(), waits.end(), is_met);
  }

  std::vector<Choice> possible() const {
    std::vector<Choice> choices;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      for (const std::deque<int>& queue : ranks_[rank].queues) {
        if (queue.empty()) continue;
        const int time = queue.front();
        const bool starts =
            is_collective(operation(time).kind)
                ? std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& r) { return can_start(r, time); })
                : can_start(ranks_[rank], time);
        if (starts) choices.push_back({rank, time});
      }
    return choices;
  }

  void execute(Rank& rank, int time) {
    const Operation& op = operation(time);
    if (find_writers(op, rank.writer) != found_in_order_[static_cast<size_t>(time)])
      fault_ = quoted(time).append(" finds what it should not");
    for (const Region& region : op.writes) rank.writer[region] = time;
    rank.queues[static_cast<size_t>(op.stream)].pop_front();
    for (int communicator : communicators_of(op, schedule_))
      rank.collectives[static_cast<size_t>(communicator)].pop_front();
    rank.done[static_cast<size_t>(time)] = true;
  }

  std::string end() const {
    for (const Rank& rank : ranks_)
      for (const std::deque<int>& queue : rank.queues)
        if (!queue.empty()) return quoted(queue.front()).append(" never starts");
    return "";
  }

  const Schedule& schedule_;
  const std::vector<std::vector<Wait>>& waits_;
  int count_ = 0;
  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<int>> found_in_order_;  // find_writers() of each operation, executed one by one
  std::string fault_;
};

}  // namespace

std::vector<int> communicators_of(const Operation& operation, const Schedule& schedule) {
  switch (operation.kind) {
    case OpKind::kGather:
      return {0};
    case OpKind::kReduceScatter:
    case OpKind::kAllReduceNorm:
      return {1};
    case OpKind::kAllReduceGradient:
      return {2};
    case OpKind::kAllReduceCount:
    case OpKind::kAllReduceLoss: {
      std::vector<int> both;
      if (schedule.shards > 1) both.push_back(1);
      if (schedule.replicas > 1) both.push_back(2);
      return both;
    }
    default:
      return {};
  }
}

std::string run_streams(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits, int steps,
                        int ranks, unsigned seed) {
  return Replay(schedule, waits, steps, ranks, seed).run();
}

}  // namespace minillm::shard
