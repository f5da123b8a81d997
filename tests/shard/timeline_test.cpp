// The simulated timeline: small schedules computed by hand, and random ones against a simulation that is too
// simple to be wrong.
#include "shard/timeline.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <random>

#include "core/error.h"
#include "tests/shard/fixtures.h"
#include "tests/shard/timeline_support.h"
#include "tests/unit/errors.h"

namespace minillm::shard {
namespace {

using test::expect_error;

void expect_times(const Timeline& timeline, int operation, double start_s, double end_s) {
  const OperationTime& time = timeline.operations[static_cast<size_t>(operation)];
  EXPECT_EQ(time.start_s, start_s) << "operation " << operation;
  EXPECT_EQ(time.end_s, end_s) << "operation " << operation;
}

TEST(Timeline, CollectivesShareTheLinkButNotTheirLatencies) {
  HandMade made;
  made.add_gather(1, 2);
  EXPECT_EQ(made.graph().step_s, 3);
  made.add_reduce(1, 2);
  Timeline timeline = made.graph();
  expect_times(timeline, 0, 0, 5);
  expect_times(timeline, 1, 0, 5);
  EXPECT_EQ(timeline.busy_s, (std::array<double, kResourceCount>{0, 4, 0}));

  made.costs[1].resource = Resource::kNetwork;
  EXPECT_EQ(made.graph().step_s, 3) << "another link is another's";
}

TEST(Timeline, AShareGrowsWhenOthersAreDone) {
  HandMade made;
  made.add_gather(0, 2);
  made.add_reduce(0, 4);
  Timeline timeline = made.graph();
  expect_times(timeline, 0, 0, 4);
  expect_times(timeline, 1, 0, 6);

  made.costs[1].latency_s = 1;  // the first has the link alone for so long
  timeline = made.graph();
  expect_times(timeline, 0, 0, 3);
  expect_times(timeline, 1, 0, 6);
}

TEST(Timeline, KernelsShareTheDevice) {
  HandMade made;
  made.add_kernel(StreamId::kCompute, 2);
  made.add_kernel(StreamId::kUpdate, 2);
  made.add(OpKind::kCopyOut, StreamId::kCopy, {.busy_s = 8});
  const Timeline timeline = made.graph();
  expect_times(timeline, 0, 6, 12);  // 0 is where the compute stream ended, and the copy goes on until 6
  expect_times(timeline, 2, 6, 18);
  EXPECT_EQ(timeline.step_s, 12);
  EXPECT_EQ(timeline.compute_s, 6) << "copies are no computation, and time is not counted twice";
  EXPECT_EQ(timeline.exposed_comm_s, 6);
}

TEST(Timeline, TransfersOfTheHostAreNoComputation) {
  HandMade made;
  made.add(OpKind::kUpload, StreamId::kCompute, {.latency_s = 1});
  made.add_kernel(StreamId::kCompute, 2);
  const Timeline timeline = made.graph();
  EXPECT_EQ(timeline.step_s, 3);
  EXPECT_EQ(timeline.compute_s, 2);
}

TEST(Timeline, OneCommunicatorTakesTurnsInTheOrderOfIssue) {
  HandMade made;
  const int late = made.add_kernel(StreamId::kCompute, 4);
  const int reduce = made.add_reduce(1, 2, {{late, 0}});
  const int gather = made.add_gather(1, 2);
  const int other = made.add(OpKind::kAllReduceGradient, StreamId::kReplicate,
                             {.resource = Resource::kNetwork, .busy_s = 3});
  expect_times(made.graph(), gather, 3, 6);
  made.schedule.one_communicator = true;
  const Timeline timeline = made.graph();
  expect_times(timeline, late, 6, 10);
  expect_times(timeline, reduce, 10, 13);
  expect_times(timeline, gather, 13, 16);
  expect_times(timeline, other, 6, 9);
  EXPECT_EQ(timeline.operations[static_cast<size_t>(gather)].after, reduce);
  EXPECT_EQ(timeline.step_s, 10);
}

// A kernel takes a quarter of the multiprocessors from start to end; what is carried by copy engines, none.
TEST(Timeline, CollectivesTakeMultiprocessorsFromKernels) {
  HandMade made;
  const int kernel = made.add_kernel(StreamId::kCompute, 6);
  const int reduce = made.add_reduce(1, 3);
  made.costs[reduce].ctas = 2;
  EXPECT_EQ(made.graph().step_s, 6) << "it is not known of how many";
  made.multiprocessors = 8;
  Timeline timeline = made.graph();
  expect_times(timeline, reduce, 0, 4);
  expect_times(timeline, kernel, 0, 4 + 3);  // three quarters of 4, and the rest alone
  EXPECT_EQ(timeline.busy_s[0], 6);

  // Two at once share the link and take half of the device, until the other is alone.
  const int gather = made.add_gather(0, 2);
  made.costs[gather].ctas = 2;
  timeline = made.graph();
  expect_times(timeline, gather, 0, 3);  // alone for 1, half of the link for 2
  expect_times(timeline, reduce, 0, 5);
  expect_times(timeline, kernel, 0, 5 + 6 - 3 * 0.5 - 2 * 0.75);
  made.costs[gather].ctas = 0;
  expect_times(made.graph(), kernel, 0, 5 + 6 - 5 * 0.75);

  made.costs[gather].ctas = 100;  // one multiprocessor is left
  expect_times(made.graph(), kernel, 0, 5 + 6 - 3 * 0.125 - 2 * 0.75);
}

TEST(Timeline, LaunchesKeepTheOrderOfIssue) {
  HandMade made;
  const int kernel = made.add_kernel(StreamId::kCompute, 4);
  const int reduce = made.add_reduce(0, 8, {{kernel, 0}});
  const int gather = made.add_gather(0, 1);
  made.costs[reduce].wire_bytes = made.costs[gather].wire_bytes = 1;
  made.costs[reduce].ctas = made.costs[gather].ctas = 1;
  Timeline timeline = made.graph();
  const auto start_s = [&](int operation) {
    return timeline.operations[operation].start_s - timeline.operations[kernel].start_s;
  };
  EXPECT_EQ(start_s(gather), 0);
  made.launch_order = true;
  timeline = made.graph();
  EXPECT_EQ(start_s(reduce), 4);
  EXPECT_EQ(start_s(gather), 4) << "when the reduction has started, not when it has ended";
  EXPECT_EQ(timeline.operations[gather].after, reduce);

  made.costs[gather].ctas = 0;
  timeline = made.graph();
  EXPECT_EQ(start_s(gather), 4) << "copy engines wait as well";
  std::swap(made.costs[reduce].ctas, made.costs[gather].ctas);
  timeline = made.graph();
  EXPECT_EQ(start_s(gather), 0) << "and nobody waits for them";

  // The reduction of the next step waits for the gather of this one, whose stream is late.
  made.costs[reduce] = {.latency_s = 1, .ctas = 1};
  made.costs[gather] = {.latency_s = 10, .ctas = 1};
  made.waits[kernel] = {{reduce, 1}};
  EXPECT_EQ(made.eager().step_s, 10);
  made.launch_order = false;
  EXPECT_EQ(made.eager().step_s, 5);
}

TEST(Timeline, WaitsForTheStepBefore) {
  HandMade made;
  const int gather = made.add_gather(0, 3);
  const int forward = made.add_kernel(StreamId::kCompute, 4, {{gather, 0}});
  Timeline timeline = made.eager();
  EXPECT_EQ(timeline.step_s, 4) << "gathers run ahead";
  EXPECT_EQ(timeline.exposed_comm_s, 0);

  made.waits[0] = {{forward, 1}};
  timeline = made.eager();
  EXPECT_EQ(timeline.step_s, 7);
  EXPECT_EQ(timeline.compute_s, 4);
  EXPECT_EQ(timeline.exposed_comm_s, 3);
  expect_times(timeline, gather, 0, 3);
  expect_times(timeline, forward, 3, 7);
  EXPECT_EQ(timeline.operations[0].after, forward);
  EXPECT_EQ(timeline.operations[0].after_steps_back, 1);
  EXPECT_EQ(timeline.operations[1].after, gather);
  EXPECT_EQ(timeline.operations[1].after_steps_back, 0);
}

TEST(Timeline, AGraphJoinsAllStreams) {
  HandMade made;
  made.add_kernel(StreamId::kCompute, 2);
  made.add_gather(0, 3);
  EXPECT_EQ(made.eager().step_s, 2);
  const Timeline timeline = made.graph();
  EXPECT_EQ(timeline.step_s, 3);
  EXPECT_EQ(timeline.operations[0].after, 1);
  EXPECT_EQ(timeline.operations[0].after_steps_back, 1);
}

TEST(Timeline, TheHostIsOneStepAhead) {
  HandMade made;
  made.add_kernel(StreamId::kCompute, 1);
  made.add_gather(0, 5);
  made.add(OpKind::kClip, StreamId::kGather, {});
  EXPECT_EQ(made.eager().step_s, 1);
  made.schedule.operations[2].kind = OpKind::kReadBack;
  const Timeline timeline = made.eager();
  EXPECT_EQ(timeline.step_s, 5);
  EXPECT_EQ(timeline.operations[0].after, 2);
  EXPECT_EQ(timeline.operations[0].after_steps_back, 2);
}

TEST(Timeline, CountsBytesByCollective) {
  HandMade made;
  made.add_gather(0, 1);
  made.add_gather(0, 1);
  made.add_reduce(0, 1);
  made.add(OpKind::kAllReduceGradient, StreamId::kReplicate, {.resource = Resource::kNetwork});
  for (size_t i = 0; i < made.costs.size(); ++i) made.costs[i].wire_bytes = int64_t{1} << i;
  const WireBytes bytes = made.graph().wire_bytes;
  EXPECT_EQ(bytes.gather, 3);
  EXPECT_EQ(bytes.reduce_scatter, 4);
  EXPECT_EQ(bytes.all_reduce, 8);
}

TEST(Timeline, NamesWhatDoesNotFit) {
  HandMade good;
  const int first = good.add_kernel(StreamId::kCompute, 1);
  const int second = good.add_gather(1, 1, {{first, 0}});
  EXPECT_EQ(good.eager().step_s, 1);
  const auto expect_refused = [&](auto change, std::initializer_list<std::string> parts) {
    HandMade bad = good;
    change(bad);
    expect_error<InternalError>([&] { bad.eager(); }, parts);
  };
  expect_refused([](HandMade& bad) { bad.costs.pop_back(); }, {"2 operations", "waits for 2", "costs of 1"});
  expect_refused([](HandMade& bad) { bad.waits.pop_back(); }, {"2 operations", "waits for 1"});
  expect_refused([](HandMade& bad) { bad = {}; }, {"0 operations"});
  expect_refused([](HandMade& bad) { bad.costs[1].busy_s = -1; }, {"operation 1 costs", "-1"});
  expect_refused([](HandMade& bad) { bad.costs[0].latency_s = std::nan(""); }, {"operation 0 costs", "nan"});
  expect_refused([](HandMade& bad) { bad.costs[1].ctas = -1; }, {"operation 1 takes -1 multiprocessors"});
  expect_refused([&](HandMade& bad) { bad.waits[0] = {{second, 0}}; }, {"operation 0 waits for operation 1"});
  expect_refused([&](HandMade& bad) { bad.waits[1] = {{first, 2}}; }, {"2 steps back"});
  expect_refused([](HandMade& bad) { bad.waits[1] = {{2, 1}}; }, {"waits for operation 2"});
  expect_refused([](HandMade& bad) { bad.waits[1] = {{-1, 1}}; }, {"waits for operation -1"});
  expect_error<InternalError>([&] { simulate(good.schedule, good.waits, good.costs, {.steps = 2}); },
                              {"2 steps", "at least 3"});
}

// On the stream that launches the graph, whatever the streams of the schedule: inputs before it, one after
// another, and read-backs after it.
TEST(Timeline, GraphsLeaveOutWhatTouchesTheHost) {
  HandMade made;
  const int upload = made.add(OpKind::kUpload, StreamId::kCompute, {.busy_s = 1});
  const int set = made.add(OpKind::kSetStep, StreamId::kUpdate, {.busy_s = 2});
  const int early = made.add_gather(0, 4);
  const int read = made.add(OpKind::kReadBack, StreamId::kUpdate, {.busy_s = 1});
  const int late = made.add_kernel(StreamId::kCompute, 8);
  Timeline timeline = made.graph();
  const auto expect_end = [&](int operation, double after_upload_s) {
    EXPECT_EQ(timeline.operations[operation].end_s - timeline.operations[upload].end_s, after_upload_s);
  };
  expect_end(set, 2);
  expect_end(early, 2 + 4);
  expect_end(late, 2 + 8);
  expect_end(read, 2 + 8 + 1);
  EXPECT_EQ(timeline.step_s, 1 + 2 + 8 + 1);
  timeline = made.eager();
  EXPECT_LT(timeline.operations[read].end_s, timeline.operations[late].end_s);
}

// Sums of scalars are over replicas too, and go the way of the gradients.
TEST(Timeline, ReplicasHaveOneCommunicator) {
  HandMade made;
  const int slow = made.add_kernel(StreamId::kUpdate, 4);
  const int loss = made.add(OpKind::kAllReduceLoss, StreamId::kReduce, HandMade::on_link(0, 1), {{slow, 0}});
  const int gradient =
      made.add(OpKind::kAllReduceGradient, StreamId::kReplicate, HandMade::on_link(0, 2), {{slow, 1}});
  const auto overlap_s = [&] {
    const Timeline timeline = made.graph();
    return timeline.operations[loss].end_s - timeline.operations[gradient].start_s;
  };
  EXPECT_EQ(overlap_s(), 5) << "one replica";
  made.schedule.replicas = 2;
  EXPECT_EQ(overlap_s(), 0);
}

/// One step from an idle machine: from event to event, by looking at every operation each time. The end of
/// each operation.
std::vector<double> simulate_plainly(const HandMade& made) {
  const size_t count = made.costs.size();
  std::vector<double> latency(count), busy(count), end(count, -1);
  for (size_t i = 0; i < count; ++i) latency[i] = made.costs[i].latency_s, busy[i] = made.costs[i].busy_s;
  size_t first = 0;  // that has not ended
  std::vector<bool> started(count);
  const auto is_launched = [&](size_t i) { return made.costs[i].ctas > 0 || made.costs[i].wire_bytes > 0; };
  const auto may_run = [&](size_t i) {
    if (end[i] >= 0) return false;
    for (const Wait& wait : made.waits[i])
      if (wait.steps_back == 0 && end[static_cast<size_t>(wait.operation)] < 0) return false;
    for (size_t j = first; j < i; ++j) {
      const bool in_turn = made.schedule.one_communicator &&
                           is_collective(made.schedule.operations[i].kind) &&
                           is_collective(made.schedule.operations[j].kind);
      if (end[j] < 0 && (in_turn || made.schedule.operations[j].stream == made.schedule.operations[i].stream))
        return false;
      if (made.launch_order && is_launched(i) && made.costs[j].ctas > 0 && !started[j]) return false;
    }
    return true;
  };
  double now = 0;
  for (size_t done = 0; done < count;) {
    std::vector<size_t> running;
    std::array<int, kResourceCount> users{};
    while (end[first] >= 0) ++first;
    int64_t ctas = 0;
    for (size_t i = first; i < count; ++i)
      if (may_run(i)) running.push_back(i), started[i] = true, ctas += made.costs[i].ctas;
    const auto all = static_cast<double>(made.multiprocessors);
    const double device = all > 0 ? std::max(all - static_cast<double>(ctas), 1.0) / all : 1;
    // How long the resource takes for a second of one user's work.
    const auto slowdown = [&](size_t i) {
      const Resource resource = made.costs[i].resource;
      return users[static_cast<size_t>(resource)] / (resource == Resource::kDevice ? device : 1);
    };
    for (size_t i : running) users[static_cast<size_t>(made.costs[i].resource)] += latency[i] == 0;
    double step = std::numeric_limits<double>::infinity();
    const auto needed = [&](size_t i) { return latency[i] > 0 ? latency[i] : busy[i] * slowdown(i); };
    for (size_t i : running) step = std::min(step, needed(i));
    now += step;
    for (size_t i : running) {
      constexpr double kRounding = 1e-12;  // of sums of some hundred numbers of about 1
      const bool over = needed(i) - step < kRounding;
      if (latency[i] > 0) {
        latency[i] = over ? 0 : latency[i] - step;
      } else if (over) {
        end[i] = now, ++done;
      } else {
        busy[i] -= step / slowdown(i);
      }
    }
  }
  return end;
}

/// `steps` steps as one: waits for the step before become waits within.
HandMade unrolled(const HandMade& made, int steps) {
  HandMade all;
  all.schedule.one_communicator = made.schedule.one_communicator;
  all.launch_order = made.launch_order;
  all.multiprocessors = made.multiprocessors;
  const int count = static_cast<int>(made.costs.size());
  for (int step = 0; step < steps; ++step)
    for (int i = 0; i < count; ++i) {
      std::vector<Wait> waits;
      for (const Wait& wait : made.waits[static_cast<size_t>(i)])
        if (step >= wait.steps_back) waits.push_back({(step - wait.steps_back) * count + wait.operation, 0});
      const Operation& operation = made.schedule.operations[static_cast<size_t>(i)];
      all.add(operation.kind, operation.stream, made.costs[static_cast<size_t>(i)], waits);
    }
  return all;
}

/// A schedule of the builder with costs drawn at random, without replicas (whose all-reduces take no turns)
/// and without what touches the host (which it waits for, and graphs leave out).
HandMade random_schedule(unsigned seed) {
  RandomCase drawn = make_random_case(seed);
  drawn.policy.replicas = 1;
  HandMade made;
  made.schedule = build_schedule(drawn.layout, drawn.program, drawn.policy);
  made.schedule.one_communicator = seed % 3 == 0;
  made.waits = derive_waits(made.schedule);
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (Operation& operation : made.schedule.operations) {
    if (touches_host(operation.kind)) operation.kind = OpKind::kClip;
    made.costs.push_back({.resource = is_collective(operation.kind) ? Resource::kLink : Resource::kDevice,
                          .latency_s = random() % 2 ? 0 : uniform(random) / 4,
                          .busy_s = random() % 8 ? uniform(random) : 0,
                          .wire_bytes = is_collective(operation.kind),
                          .ctas = is_collective(operation.kind) ? static_cast<int64_t>(random() % 3) : 0});
  }
  made.launch_order = seed % 2 == 0;
  made.multiprocessors = seed % 4 < 2 ? 5 : 0;
  return made;
}

constexpr unsigned kSeeds = 24;
constexpr double kTolerance = 1e-9;  // rounding of sums of some hundred numbers of about 1

/// The first operation that ends at another time than `expected`, or -1.
int first_difference(const Timeline& timeline, const std::vector<double>& expected) {
  const double origin = timeline.operations[0].end_s - expected[0];
  for (size_t i = 0; i < expected.size(); ++i)
    if (std::abs(timeline.operations[i].end_s - origin - expected[i]) > kTolerance)
      return static_cast<int>(i);
  return -1;
}

TEST(Timeline, AgreesWithAPlainSimulation) {
  int noticed = 0;
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    HandMade made = random_schedule(seed);
    const Timeline timeline = made.graph();
    EXPECT_EQ(first_difference(timeline, simulate_plainly(made)), -1) << "seed " << seed;
    // A simulation that forgot one wait would be noticed, where anything hinges on it.
    for (size_t i = 0; i < made.waits.size() && noticed <= static_cast<int>(seed); ++i) {
      if (made.waits[i].empty() || made.waits[i][0].steps_back > 0) continue;
      const std::vector<Wait> kept = std::exchange(made.waits[i], {});
      noticed += first_difference(timeline, simulate_plainly(made)) >= 0;
      made.waits[i] = kept;
    }
  }
  EXPECT_EQ(noticed, static_cast<int>(kSeeds));
}

TEST(Timeline, StepsInARowAreOneLongStep) {
  constexpr int kSteps = 6;
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    const HandMade made = random_schedule(seed);
    const std::vector<double> ends = simulate_plainly(unrolled(made, kSteps));
    const Timeline timeline = made.eager(kSteps);
    const size_t count = made.costs.size();
    const std::vector<double> reported(ends.begin() + static_cast<int64_t>((kSteps - 2) * count),
                                       ends.begin() + static_cast<int64_t>((kSteps - 1) * count));
    EXPECT_EQ(first_difference(timeline, reported), -1) << "seed " << seed;
    double before = 0, last = 0;  // ends of the compute stream
    for (size_t i = 0; i < count; ++i) {
      if (made.schedule.operations[i].stream != StreamId::kCompute) continue;
      before = std::max(before, ends[(kSteps - 3) * count + i]);
      last = std::max(last, reported[i]);
    }
    EXPECT_NEAR(timeline.step_s, last - before, kTolerance) << "seed " << seed;
  }
}

/// Why the timeline cannot be: an operation that starts before what it comes after has ended, or a step that
/// is shorter than its work.
std::optional<std::string> impossible(const HandMade& made, const Timeline& timeline) {
  const auto& times = timeline.operations;
  std::array<int, kStreamCount> last;
  last.fill(-1);
  for (size_t i = 0; i < times.size(); ++i) {
    const auto starts_before = [&](int other) {
      return other >= 0 && times[i].start_s < times[static_cast<size_t>(other)].end_s - kTolerance;
    };
    int& before = last[static_cast<size_t>(made.schedule.operations[i].stream)];
    if (starts_before(before)) return "stream order of " + std::to_string(i);
    before = static_cast<int>(i);
    for (const Wait& wait : made.waits[i])
      if (wait.steps_back == 0 && starts_before(wait.operation)) return "wait of " + std::to_string(i);
    const double least = made.costs[i].latency_s + made.costs[i].busy_s;
    if (times[i].end_s - times[i].start_s < least - kTolerance) return "length of " + std::to_string(i);
  }
  for (double busy_s : timeline.busy_s)
    if (timeline.step_s < busy_s - kTolerance) return "work of the step";
  if (timeline.compute_s > timeline.step_s + kTolerance || timeline.exposed_comm_s < -kTolerance)
    return "kernels longer than the step";
  return std::nullopt;
}

TEST(Timeline, IsPossible) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    const HandMade made = random_schedule(seed);
    const Timeline timeline = made.graph();
    EXPECT_EQ(impossible(made, timeline), std::nullopt) << "seed " << seed;
    Timeline wrong = timeline;
    wrong.operations.back().start_s -= timeline.step_s;
    wrong.operations.back().end_s -= timeline.step_s;
    EXPECT_NE(impossible(made, wrong), std::nullopt) << "seed " << seed;
    wrong = timeline;
    wrong.operations[1].end_s = wrong.operations[1].start_s - 1;
    EXPECT_NE(impossible(made, wrong), std::nullopt) << "seed " << seed;
    wrong = timeline;
    wrong.step_s = std::max(timeline.busy_s[0], timeline.busy_s[1]) / 2;
    EXPECT_NE(impossible(made, wrong), std::nullopt) << "seed " << seed;
  }
}

TEST(Timeline, IsFast) {
  HandMade made;
  for (int block = 0; block < 800; ++block) {
    const int gather = made.add_gather(0.25, 1);
    const int forward = made.add_kernel(StreamId::kCompute, 1, {{gather, 0}});
    made.add_reduce(0.25, 1, {{forward, 0}});
  }
  const auto begin = std::chrono::steady_clock::now();
  const Timeline timeline = made.eager();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(timeline.operations.size(), 2400u);
  RecordProperty("milliseconds", std::to_string(1e3 * taken.count()));
  EXPECT_LT(taken.count(), 1) << "it takes some milliseconds; a second means quadratic time";
}

}  // namespace
}  // namespace minillm::shard
