#include "shard/timeline.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include "core/error.h"

namespace minillm::shard {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// Something to happen to a node, the earliest on top; nodes in the order of issue where times are equal.
using Event = std::pair<double, int>;
using Events = std::priority_queue<Event, std::vector<Event>, std::greater<>>;

/// A resource that its users share equally, at times not all of it. Its clock counts what each of them has
/// had of it, so that a user is done when the clock shows its cost more than when it came, whoever comes and
/// goes meanwhile.
class SharedResource {
 public:
  void add(int node, double busy_s, double now) {
    advance(now);
    users_.push({clock_ + busy_s, node});
  }
  double next_end() const {
    if (users_.empty()) return kNever;
    return now_ + std::max(0.0, users_.top().first - clock_) * static_cast<double>(users_.size()) / speed_;
  }
  void set_speed(double speed, double now) {
    advance(now);
    speed_ = speed;
  }
  int remove_first(double now) {
    const auto [end, node] = users_.top();
    advance(now);
    clock_ = end;  // free of what rounding adds up to
    users_.pop();
    return node;
  }

 private:
  void advance(double now) {
    if (!users_.empty()) clock_ += (now - now_) * speed_ / static_cast<double>(users_.size());
    now_ = now;
  }

  double clock_ = 0, now_ = 0, speed_ = 1;
  Events users_;
};

/// What has to be done before what: an operation of each step, and before those a node for the step's start.
class Graph {
 public:
  Graph(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits,
        const std::vector<OperationCost>& costs, const SimulationOptions& options)
      : operations_(static_cast<int>(schedule.operations.size())),
        nodes_(static_cast<size_t>(options.steps * (operations_ + 1))) {
    const bool joined = options.graph;
    for (int step = 0; step < options.steps; ++step) {
      add_start(schedule, joined, step);
      add_streams(schedule, joined, step, joined ? add_host(schedule, step) : start(step));
      for (int i = 0; i < operations_; ++i)
        for (const Wait& wait : waits[i])
          if (step >= wait.steps_back) add(node(step - wait.steps_back, wait.operation), node(step, i));
      add_turns(schedule, step);
      if (options.launch_order) add_launches(costs, step);
    }
  }

  struct Node {
    int waits = 0;                    ///< how many it is a follower of
    std::vector<int> followers;       ///< of its end
    std::vector<int> launched_after;  ///< followers of its start
  };

  int count() const { return static_cast<int>(nodes_.size()); }
  const Node& operator[](int i) const { return nodes_[i]; }
  int start(int step) const { return step * (operations_ + 1); }
  int node(int step, int operation) const { return start(step) + 1 + operation; }
  /// -1 for the start of a step.
  int operation_of(int node) const { return node % (operations_ + 1) - 1; }
  int step_of(int node) const { return node / (operations_ + 1); }

 private:
  void add(int before, int after) {
    nodes_[before].followers.push_back(after);
    ++nodes_[after].waits;
  }

  void add_start(const Schedule& schedule, bool joined, int step) {
    for (int i = 0; i < operations_; ++i) {
      if (joined && step >= 1) add(node(step - 1, i), start(step));
      if (step >= 2 && schedule.operations[i].kind == OpKind::kReadBack) add(node(step - 2, i), start(step));
    }
  }

  // What a graph leaves to the stream that it is launched on: inputs one after another before it, read-backs
  // after all of it. Returns the last of the inputs.
  int add_host(const Schedule& schedule, int step) {
    int last_input = start(step);
    for (int i = 0; i < operations_; ++i) {
      const OpKind kind = schedule.operations[i].kind;
      if (!touches_host(kind)) continue;
      if (kind != OpKind::kReadBack) {
        add(last_input, node(step, i));
        last_input = node(step, i);
        continue;
      }
      for (int other = 0; other < operations_; ++other)
        if (!touches_host(schedule.operations[other].kind)) add(node(step, other), node(step, i));
    }
    return last_input;
  }

  // Operations after the first of a stream have `begin` behind them, and so has the first of the next step
  // this one's last.
  void add_streams(const Schedule& schedule, bool joined, int step, int begin) {
    std::array<int, kStreamCount> last;
    last.fill(-1);
    for (int i = 0; i < operations_; ++i) {
      if (joined && touches_host(schedule.operations[i].kind)) continue;
      int& before = last[static_cast<size_t>(schedule.operations[i].stream)];
      if (before >= 0) {
        add(node(step, before), node(step, i));
      } else {
        add(begin, node(step, i));
        if (step > 0) add(node(step - 1, last_on_stream(schedule, i)), node(step, i));
      }
      before = i;
    }
  }

  int last_on_stream(const Schedule& schedule, int operation) const {
    int last = operation;
    for (int i = operation; i < operations_; ++i)
      if (schedule.operations[i].stream == schedule.operations[operation].stream) last = i;
    return last;
  }

  void add_turns(const Schedule& schedule, int step) {
    for (int i = 0; i < operations_; ++i) {
      if (!takes_turns(schedule.operations[i].kind, schedule)) continue;
      if (last_turn_ >= 0) add(last_turn_, node(step, i));
      last_turn_ = node(step, i);
    }
  }

  void add_launches(const std::vector<OperationCost>& costs, int step) {
    for (int i = 0; i < operations_; ++i) {
      if (costs[i].ctas == 0 && costs[i].wire_bytes == 0) continue;
      if (last_launch_ >= 0) {
        nodes_[last_launch_].launched_after.push_back(node(step, i));
        ++nodes_[node(step, i)].waits;
      }
      if (costs[i].ctas > 0) last_launch_ = node(step, i);
    }
  }

  // On the one communicator, or else on that of the replicas, which two streams use. Each of the others is
  // used by one stream, whose order is that of issue.
  static bool takes_turns(OpKind kind, const Schedule& schedule) {
    if (schedule.one_communicator) return is_collective(kind) && kind != OpKind::kAllReduceGradient;
    return schedule.replicas > 1 && (kind == OpKind::kAllReduceGradient || kind == OpKind::kAllReduceCount ||
                                     kind == OpKind::kAllReduceLoss);
  }

  int operations_ = 0;
  int last_turn_ = -1, last_launch_ = -1;
  std::vector<Node> nodes_;
};

struct Run {
  double start_s = -1, end_s = -1;
  int after = -1;  // node that it waited for last
};

class Simulation {
 public:
  Simulation(const Graph& graph, const std::vector<OperationCost>& costs, int64_t multiprocessors)
      : graph_(graph),
        costs_(costs),
        multiprocessors_(multiprocessors),
        runs_(static_cast<size_t>(graph_.count())) {
    for (int i = 0; i < graph_.count(); ++i) missing_.push_back(graph_[i].waits);
  }

  std::vector<Run> run() && {
    for (int i = 0; i < graph_.count(); ++i)
      if (graph_[i].waits == 0) start(i, 0);
    while (true) {
      double now = kNever;
      if (!latencies_.empty()) now = latencies_.top().first;
      SharedResource* first = nullptr;
      for (SharedResource& resource : resources_)
        if (resource.next_end() < now) {
          now = resource.next_end();
          first = &resource;
        }
      if (now == kNever) break;
      if (first != nullptr) {
        finish(first->remove_first(now), now);
      } else {
        const int node = latencies_.top().second;
        latencies_.pop();
        const OperationCost& cost = costs_[graph_.operation_of(node)];
        resources_[static_cast<size_t>(cost.resource)].add(node, cost.busy_s, now);
      }
    }
    return std::move(runs_);
  }

 private:
  void start(int node, double now) {
    runs_[node].start_s = now;
    const int operation = graph_.operation_of(node);
    if (operation < 0) return finish(node, now);
    take_multiprocessors(costs_[operation].ctas, now);
    latencies_.push({now + costs_[operation].latency_s, node});
    for (int next : graph_[node].launched_after) follow(next, node, now);
  }

  void finish(int node, double now) {
    runs_[node].end_s = now;
    if (const int operation = graph_.operation_of(node); operation >= 0)
      take_multiprocessors(-costs_[operation].ctas, now);
    for (int follower : graph_[node].followers) follow(follower, node, now);
  }

  void follow(int follower, int node, double now) {
    if (--missing_[follower] > 0) return;
    runs_[follower].after = node;
    start(follower, now);
  }

  // Thread blocks that find no multiprocessor wait for one; kernels keep at least one going.
  void take_multiprocessors(int64_t ctas, double now) {
    if (ctas == 0 || multiprocessors_ == 0) return;
    taken_ += ctas;
    const int64_t left = std::max<int64_t>(multiprocessors_ - taken_, 1);
    resources_[static_cast<size_t>(Resource::kDevice)].set_speed(
        static_cast<double>(left) / static_cast<double>(multiprocessors_), now);
  }

  const Graph& graph_;
  const std::vector<OperationCost>& costs_;
  const int64_t multiprocessors_;
  int64_t taken_ = 0;         // of them, by collectives that run
  std::vector<int> missing_;  // by node, of what it waits for
  Events latencies_;
  std::array<SharedResource, kResourceCount> resources_;
  std::vector<Run> runs_;
};

void check(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits,
           const std::vector<OperationCost>& costs, const SimulationOptions& options) {
  const size_t count = schedule.operations.size();
  if (count == 0 || waits.size() != count || costs.size() != count)
    throw InternalError("simulate: the schedule has " + std::to_string(count) +
                        " operations, with waits for " + std::to_string(waits.size()) + " and costs of " +
                        std::to_string(costs.size()) + "; these must be equal and above 0");
  if (options.steps < 3)
    throw InternalError("simulate: " + std::to_string(options.steps) + " steps; at least 3 are needed");
  check_waits("simulate", schedule, waits);
  const auto is_time = [](double seconds) { return std::isfinite(seconds) && seconds >= 0; };
  for (size_t i = 0; i < count; ++i) {
    if (!is_time(costs[i].latency_s) || !is_time(costs[i].busy_s))
      throw InternalError("simulate: operation " + std::to_string(i) + " costs " +
                          std::to_string(costs[i].latency_s) + " s and " + std::to_string(costs[i].busy_s) +
                          " s; both must be 0 or more");
    if (costs[i].ctas < 0)
      throw InternalError("simulate: operation " + std::to_string(i) + " takes " +
                          std::to_string(costs[i].ctas) + " multiprocessors; it must be 0 or more");
  }
}

/// When the compute stream, or any stream if that has nothing to do, is done with a step.
double step_end(const Schedule& schedule, const Graph& graph, const std::vector<Run>& runs, int step) {
  double of_compute = -1, of_all = -1;
  for (size_t i = 0; i < schedule.operations.size(); ++i) {
    const double end = runs[graph.node(step, static_cast<int>(i))].end_s;
    of_all = std::max(of_all, end);
    if (schedule.operations[i].stream == StreamId::kCompute) of_compute = std::max(of_compute, end);
  }
  return of_compute >= 0 ? of_compute : of_all;
}

bool is_kernel(OpKind kind) {
  return !is_collective(kind) && !is_copy(kind) && !touches_host(kind);
}

/// Seconds from `begin` to `end` in which at least one kernel runs.
double kernel_time(const Schedule& schedule, const Graph& graph, const std::vector<Run>& runs, double begin,
                   double end) {
  std::vector<std::pair<double, double>> intervals;
  for (int node = 0; node < graph.count(); ++node) {
    const int operation = graph.operation_of(node);
    if (operation < 0 || !is_kernel(schedule.operations[operation].kind)) continue;
    const double from = std::max(begin, runs[node].start_s), to = std::min(end, runs[node].end_s);
    if (from < to) intervals.emplace_back(from, to);
  }
  std::ranges::sort(intervals);
  double sum = 0, covered = begin;
  for (const auto& [from, to] : intervals) {
    sum += std::max(0.0, to - std::max(from, covered));
    covered = std::max(covered, to);
  }
  return sum;
}

void add_costs(const Schedule& schedule, const std::vector<OperationCost>& costs, Timeline& timeline) {
  for (size_t i = 0; i < costs.size(); ++i) {
    timeline.busy_s[static_cast<size_t>(costs[i].resource)] += costs[i].busy_s;
    const OpKind kind = schedule.operations[i].kind;
    int64_t& bytes = kind == OpKind::kGather          ? timeline.wire_bytes.gather
                     : kind == OpKind::kReduceScatter ? timeline.wire_bytes.reduce_scatter
                                                      : timeline.wire_bytes.all_reduce;
    bytes += costs[i].wire_bytes;
  }
}

}  // namespace

Timeline simulate(const Schedule& schedule, const std::vector<std::vector<Wait>>& waits,
                  const std::vector<OperationCost>& costs, const SimulationOptions& options) {
  check(schedule, waits, costs, options);
  const Graph graph(schedule, waits, costs, options);
  const std::vector<Run> runs = Simulation(graph, costs, options.multiprocessors).run();

  // The last step has no successor beside it.
  const int step = options.steps - 2;
  const double begin = step_end(schedule, graph, runs, step - 1), end = step_end(schedule, graph, runs, step);
  Timeline timeline;
  timeline.step_s = end - begin;
  timeline.compute_s = kernel_time(schedule, graph, runs, begin, end);
  timeline.exposed_comm_s = timeline.step_s - timeline.compute_s;
  add_costs(schedule, costs, timeline);
  for (int i = 0; i < static_cast<int>(schedule.operations.size()); ++i) {
    const Run& run = runs[graph.node(step, i)];
    int after = run.after;
    if (after >= 0 && graph.operation_of(after) < 0)
      after = runs[after].after;  // what the step's start waited for
    OperationTime time{.start_s = run.start_s - begin, .end_s = run.end_s - begin};
    if (after >= 0) {
      time.after = graph.operation_of(after);
      time.after_steps_back = step - graph.step_of(after);
    }
    timeline.operations.push_back(time);
  }
  return timeline;
}

}  // namespace minillm::shard
