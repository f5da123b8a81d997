// How the watchdog counts time without progress, on a clock that the test moves.
#include "comm/phase.h"

#include <gtest/gtest.h>

namespace minillm::comm {
namespace {

using namespace std::chrono_literals;

constexpr double kLimit = 5;

/// A timer that is told the time like the watchdog's.
class PhaseTime : public ::testing::Test {
 protected:
  /// Ticks as a process that runs does, or with pauses of `each`.
  void pass(PhaseTimer::Clock::duration time, PhaseTimer::Clock::duration each = PhaseTimer::kTick) {
    for (const auto end = now + time; now < end;) timer.tick(now += each);
  }

  PhaseTimer::Clock::time_point now{};
  PhaseTimer timer{{.name = "step 12", .limit_s = kLimit, .limit = "parallel.timeout_s"}, now};
};

TEST_F(PhaseTime, RunsOutAtTheLimit) {
  pass(4900ms);
  EXPECT_FALSE(timer.overdue());
  pass(100ms);
  EXPECT_TRUE(timer.overdue());
}

TEST_F(PhaseTime, BeginsAnewWithProgressAndWithPhases) {
  for (int i = 0; i < 3; ++i) {
    pass(4900ms);
    timer.progress();
    pass(4900ms);
    timer.enter({.name = "saving", .limit_s = kLimit, .limit = "checkpoint.timeout_s"});
    EXPECT_FALSE(timer.overdue());
  }
  EXPECT_EQ(timer.phase().name, "saving");
}

TEST_F(PhaseTime, HasTheLimitOfThePhase) {
  timer.enter({.name = "saving", .limit_s = 3600, .limit = "checkpoint.timeout_s"});
  pass(3599s);
  EXPECT_FALSE(timer.overdue());
  pass(1s);
  EXPECT_TRUE(timer.overdue());
}

TEST_F(PhaseTime, DoesNotCountWhileTheProcessIsStopped) {
  pass(4s);
  now += 24h;
  timer.tick(now);  // the first thing that it does when it goes on
  EXPECT_FALSE(timer.overdue());
  pass(700ms);
  EXPECT_FALSE(timer.overdue());
  pass(100ms);
  EXPECT_TRUE(timer.overdue()) << "the pause counts as two ticks";
}

TEST_F(PhaseTime, CountsOnABusyMachine) {
  pass(4800ms, 200ms);
  EXPECT_FALSE(timer.overdue());
  pass(200ms, 200ms);
  EXPECT_TRUE(timer.overdue());
}

TEST_F(PhaseTime, SaysWhatWasWaitedForAndWhatMayBeTheCause) {
  const std::string start = "no progress for 5 s in step 12: ";
  const std::string end =
      "the device or a file system does not answer, or this takes longer than parallel.timeout_s";
  EXPECT_EQ(timer.complaint(2), start + "another rank has failed or is stopped, " + end);
  EXPECT_EQ(timer.complaint(1), start + end);
}

}  // namespace
}  // namespace minillm::comm
