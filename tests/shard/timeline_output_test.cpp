// How a timeline is shown: as text and as a trace.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "tests/shard/timeline_support.h"
#include "tests/unit/errors.h"

namespace minillm::shard {
namespace {

using test::expect_error;
using Json = nlohmann::json;

constexpr double kMilliseconds = 1e-3;

/// Two units forward and backward, their gathers and reductions, an update.
HandMade small_step() {
  HandMade made;
  const auto kernel = [&](OpKind kind, int unit, double ms, std::vector<Wait> waits) {
    return made.add(kind, StreamId::kCompute, {.busy_s = ms * kMilliseconds}, std::move(waits), unit);
  };
  const int gather0 = made.add(OpKind::kGather, StreamId::kGather, made.on_link(0, kMilliseconds), {}, 0);
  const int gather1 =
      made.add(OpKind::kGather, StreamId::kGather, made.on_link(0, 2 * kMilliseconds), {}, 11);
  kernel(OpKind::kForward, 0, 1, {{gather0, 0}});
  kernel(OpKind::kHeadLoss, 11, 3, {{gather1, 0}});
  const int backward = kernel(OpKind::kBackward, 0, 2, {});
  const int reduce = made.add(OpKind::kReduceScatter, StreamId::kReduce,
                              made.on_link(kMilliseconds, kMilliseconds), {{backward, 0}}, 0);
  const int update = kernel(OpKind::kUpdate, 0, 1, {{reduce, 0}});
  made.waits[static_cast<size_t>(gather0)] = {{update, 1}};
  made.costs[static_cast<size_t>(gather0)].wire_bytes = 4096;
  made.schedule.operations[static_cast<size_t>(gather0)].weight_slot = 1;
  return made;
}

TEST(TimelineText, ShowsLanes) {
  const HandMade made = small_step();
  const Timeline timeline = made.eager();
  EXPECT_NEAR(timeline.step_s, 11 * kMilliseconds, 1e-12);
  EXPECT_EQ(draw_lanes(made.schedule, timeline, {}, 44), R"(          0 ms       2.75       5.5        8.25
          |          |          |          |
compute   ....FFFF....LLLLLLLLLLLLBBBBBBBB........UUUU
  unit        0000    11111111111100000000        0000
gather    GGGGGGGGGGGG................................
  unit    000011111111
reduce    ................................SSSSSSSS....
  unit                                    00000000
          B backward   F forward   G gather
          L loss   S reduce-scatter   U update
          unit: last digit
step 11.000 ms: kernels run for 7.000 ms, communication is exposed for 4.000 ms (36.4%)
)");
}

TEST(TimelineText, NamesUnitsAndMarksWhatIsBrief) {
  HandMade made = small_step();
  made.costs[5].busy_s += 0.19 * kMilliseconds;
  made.costs[6].busy_s = 0.06 * kMilliseconds;  // a quarter of a column, about
  const Timeline timeline = made.eager();
  const std::vector<std::string> names = {"embedding", "", "", "", "", "", "", "", "", "", "", "block17"};
  const std::string text = draw_lanes(made.schedule, timeline, names, 41);
  EXPECT_EQ(text.substr(text.find("\ncompute")), R"(
compute   ....FFFF....LLLLLLLLLLLLBBBBBBBB........:
  unit        EEEE    777777777777EEEEEEEE        E
gather    GGGGGGGGGGGG.............................
  unit    EEEE77777777
reduce    ................................SSSSSSSSS
  unit                                    EEEEEEEEE
          : less than half a column   B backward
          F forward   G gather   L loss
          S reduce-scatter
          unit: last digit, E embedding
step 10.250 ms: kernels run for 6.060 ms, communication is exposed for 4.190 ms (40.9%)
)");
}

TEST(TimelineText, ShowsTheStepsBesideWhereTheyOverlap) {
  HandMade made = small_step();
  made.waits[0] = {{3, 1}};  // after the loss of the step before
  const Timeline timeline = made.eager();
  const std::string text = draw_lanes(made.schedule, timeline, {});
  EXPECT_LT(timeline.operations[0].start_s, 0);
  EXPECT_NE(text.find("\ngather    "), std::string::npos) << text;
  const std::string lane = text.substr(text.find("\ngather    ") + 11, 100);
  EXPECT_NEAR(std::ranges::count(lane, 'G'), 100 * 3 / 9.0, 2) << "of two operations, to the column\n"
                                                               << text;
  for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1)
    EXPECT_LE(text.find('\n', at) - at, 110u) << text;
}

TEST(TimelineText, RefusesOtherTimes) {
  const HandMade made = small_step();
  Timeline timeline = made.eager();
  expect_error<InternalError>([&] { draw_lanes(made.schedule, timeline, {}, 39); }, {"39 columns"});
  timeline.operations.pop_back();
  expect_error<InternalError>([&] { draw_lanes(made.schedule, timeline, {}); }, {"6 times of 7 operations"});
}

TEST(TimelineTrace, HasASliceForEachOperationAndAnArrowForEachWait) {
  const HandMade made = small_step();
  const Timeline timeline = made.eager();
  const Json trace =
      Json::parse(chrome_trace(made.schedule, made.waits, made.costs, timeline, {"embedding"}));
  EXPECT_EQ(trace["displayTimeUnit"], "ms");
  std::vector<Json> slices;
  std::map<int, std::vector<Json>> arrows;
  std::set<std::string> threads;
  for (const Json& event : trace["traceEvents"]) {
    EXPECT_EQ(event["pid"], 0);
    if (event["ph"] == "X") slices.push_back(event);
    if (event["ph"] == "s" || event["ph"] == "f") arrows[event["id"]].push_back(event);
    if (event["name"] == "thread_name") threads.insert(event["args"]["name"]);
  }
  EXPECT_EQ(threads, (std::set<std::string>{"compute", "gather", "reduce"}));
  ASSERT_EQ(slices.size(), 7u);
  EXPECT_EQ(slices[0].dump(),
            R"({"args":{"unit":0,"waits_for":["update embedding, of the step before"],"weight_slot":1,)"
            R"("wire_bytes":4096},"cat":"gather","dur":)" +
                slices[0]["dur"].dump() +
                R"(,"name":"gather embedding -> weight slot 1","ph":"X","pid":0,"tid":1,"ts":0.0})");
  for (size_t i = 0; i < slices.size(); ++i) {
    EXPECT_NEAR(slices[i]["ts"], 1e6 * (timeline.operations[i].start_s - timeline.operations[0].start_s),
                1e-6);
    EXPECT_NEAR(slices[i]["dur"], 1e6 * (timeline.operations[i].end_s - timeline.operations[i].start_s),
                1e-6);
  }
  // Each arrow starts within the slice of what is waited for, and ends at the start of what waits.
  ASSERT_EQ(arrows.size(), 4u);
  const std::vector<std::pair<size_t, size_t>> expected = {{0, 2}, {1, 3}, {4, 5}, {5, 6}};
  for (const auto& [id, ends] : arrows) {
    ASSERT_EQ(ends.size(), 2u);
    const auto& [from, to] = expected[static_cast<size_t>(id)];
    EXPECT_EQ(ends[0]["ph"], "s");
    EXPECT_EQ(ends[0]["tid"], slices[from]["tid"]);
    EXPECT_GE(ends[0]["ts"], slices[from]["ts"]);
    EXPECT_LT(ends[0]["ts"], slices[from]["ts"].get<double>() + slices[from]["dur"].get<double>());
    EXPECT_EQ(ends[1]["ph"], "f");
    EXPECT_EQ(ends[1]["bp"], "e");
    EXPECT_EQ(ends[1]["tid"], slices[to]["tid"]);
    EXPECT_EQ(ends[1]["ts"], slices[to]["ts"]);
  }
}

TEST(TimelineTrace, RefusesOtherTimes) {
  const HandMade made = small_step();
  Timeline timeline = made.eager();
  timeline.operations.pop_back();
  expect_error<InternalError>([&] { chrome_trace(made.schedule, made.waits, made.costs, timeline, {}); },
                              {"7 operations", "7 of waits", "7 of costs", "6 of times"});
}

}  // namespace
}  // namespace minillm::shard
