#include "shard/lifetimes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "random_step.h"
#include "shard/waits.h"

namespace minillm::shard {
namespace {

using Waits = std::vector<std::vector<Wait>>;
using Touches = std::vector<std::vector<Touch>>;

constexpr StreamId kC = StreamId::kCompute, kG = StreamId::kGather, kR = StreamId::kReduce;

Schedule on_streams(const std::vector<StreamId>& streams) {
  Schedule schedule;
  for (StreamId stream : streams) schedule.operations.push_back({.kind = OpKind::kForward, .stream = stream});
  return schedule;
}

// Lives of pieces that are only written.
std::vector<std::optional<Life>> lives_of(const Schedule& schedule, const Waits& waits,
                                          const std::vector<std::vector<int>>& pieces, int count) {
  Touches touches;
  for (const auto& list : pieces) {
    touches.emplace_back();
    for (int piece : list) touches.back().push_back({piece, true});
  }
  return find_lives(schedule, order_of(schedule, waits), touches, count);
}

bool share(const Schedule& schedule, const Waits& waits, const std::vector<std::vector<int>>& pieces) {
  const auto lives = lives_of(schedule, waits, pieces, 2);
  return may_share(*lives[0], *lives[1], order_of(schedule, waits));
}

TEST(Lifetimes, OneStreamOrdersWhatDoesNotMeet) {
  const Schedule schedule = on_streams({kC, kC, kC});
  const Waits none(3);
  EXPECT_TRUE(share(schedule, none, {{0}, {1}, {}}));
  EXPECT_TRUE(share(schedule, none, {{0}, {0}, {1}}));
  EXPECT_FALSE(share(schedule, none, {{0}, {0, 1}, {}}));
  EXPECT_FALSE(share(schedule, none, {{0}, {1}, {0}}));
}

TEST(Lifetimes, BetweenStreamsAWaitThereAndOneBackAreNeeded) {
  const Schedule schedule = on_streams({kC, kG});
  const std::vector<std::vector<int>> pieces = {{0}, {1}};
  EXPECT_FALSE(share(schedule, {{}, {}}, pieces));
  EXPECT_FALSE(share(schedule, {{}, {{0, 0}}}, pieces)) << "the next step's first would not wait";
  EXPECT_FALSE(share(schedule, {{{1, 1}}, {}}, pieces));
  EXPECT_TRUE(share(schedule, {{{1, 1}}, {{0, 0}}}, pieces));
}

TEST(Lifetimes, OrderTravelsThroughOtherStreams) {
  const Schedule schedule = on_streams({kC, kG, kR});
  const std::vector<std::vector<int>> pieces = {{0}, {}, {1}};
  EXPECT_TRUE(share(schedule, {{{2, 1}}, {{0, 0}}, {{1, 0}}}, pieces));
  EXPECT_FALSE(share(schedule, {{{2, 1}}, {}, {{1, 0}}}, pieces));
}

TEST(Lifetimes, EveryFirstAccessHasToWait) {
  // Piece 1 begins on two streams, of which one does not wait for piece 0.
  const Schedule schedule = on_streams({kC, kG, kR, kC});
  const std::vector<std::vector<int>> pieces = {{0}, {1}, {1}, {}};
  EXPECT_FALSE(share(schedule, {{{1, 1}, {2, 1}}, {{0, 0}}, {}, {}}, pieces));
  EXPECT_TRUE(share(schedule, {{{1, 1}, {2, 1}}, {{0, 0}}, {{0, 0}}, {}}, pieces));
}

TEST(Lifetimes, WorkForTheNextStepBeginsTheNextLife) {
  Schedule schedule = on_streams({kC, kC, kC, kC});
  schedule.operations[3].next_step = true;
  const auto lives = lives_of(schedule, Waits(4), {{0}, {}, {1}, {0}}, 2);
  EXPECT_EQ(lives[0]->first % 4, 3);
  EXPECT_EQ(lives[0]->last - lives[0]->first, 1);
  EXPECT_TRUE(share(schedule, Waits(4), {{0}, {}, {1}, {0}}));
  EXPECT_FALSE(share(schedule, Waits(4), {{0, 1}, {}, {}, {0}}));
  // All of its accesses are for the next step: it lives at the end of this one.
  EXPECT_TRUE(share(schedule, Waits(4), {{1}, {}, {}, {0}}));
}

TEST(Lifetimes, PiecesWithoutAccessesHaveNone) {
  EXPECT_FALSE(lives_of(on_streams({kC}), Waits(1), {{1}}, 2)[0].has_value());
  EXPECT_TRUE(lives_of(on_streams({}), {}, {}, 0).empty());
}

TEST(Lifetimes, RefusesWhatCannotBe) {
  const Schedule schedule = on_streams({kC, kG});
  EXPECT_THROW(order_of(schedule, {{}}), InternalError);
  EXPECT_THROW(order_of(schedule, {{{1, 0}}, {}}), InternalError);
  EXPECT_THROW(order_of(schedule, {{}, {{2, 1}}}), InternalError);
  EXPECT_THROW(order_of(schedule, {{}, {{-1, 1}}}), InternalError);
  EXPECT_THROW(order_of(schedule, {{}, {{0, 2}}}), InternalError);

  Schedule handed_over = on_streams({kC, kC});
  handed_over.operations[1].next_step = true;
  const StepOrder order = order_of(handed_over, Waits(2));
  EXPECT_NO_THROW(find_lives(handed_over, order, {{{0, false}}, {{0, true}}}, 1));
  EXPECT_NO_THROW(find_lives(handed_over, order, {{}, {{0, false}, {0, true}}}, 1));
  EXPECT_THROW(find_lives(handed_over, order, {{{0, true}}, {{0, false}}}, 1), InternalError);
}

// The definition, on all operations of some steps.
class Unrolled {
 public:
  static constexpr int kSteps = 5;

  Unrolled(const Schedule& schedule, const Waits& waits, const Touches& touches)
      : count_(schedule.operations.size()), before_(kSteps * count_, std::vector<bool>(kSteps * count_)) {
    std::map<StreamId, size_t> previous;
    for (size_t at = 0; at < before_.size(); ++at) {
      const size_t i = at % count_;
      const auto follow = [&](size_t other) {
        before_[at][other] = true;
        for (size_t x = 0; x < other; ++x)
          if (before_[other][x]) before_[at][x] = true;
      };
      for (const Wait& wait : waits[i])
        if (at + static_cast<size_t>(wait.operation) >= i + static_cast<size_t>(wait.steps_back) * count_)
          follow(at - i + static_cast<size_t>(wait.operation) -
                 static_cast<size_t>(wait.steps_back) * count_);
      const StreamId stream = schedule.operations[i].stream;
      if (previous.contains(stream)) follow(previous[stream]);
      previous[stream] = at;
      for (const Touch& touch : touches[i])
        lives_[{touch.piece, static_cast<int>(at / count_) + schedule.operations[i].next_step}].push_back(at);
    }
  }

  // Whether a life of `b` fits between two of `a` in the middle of the unrolled steps.
  bool may_share(int a, int b) const {
    for (int step = 1; step <= 4; ++step)
      if (all_before({a, 2}, {b, step}) && all_before({b, step}, {a, 3})) return true;
    return false;
  }

 private:
  using LifeOf = std::pair<int, int>;  // piece, step

  bool all_before(LifeOf first, LifeOf second) const {
    for (size_t x : lives_.at(first))
      for (size_t y : lives_.at(second))
        if (!before_[y][x]) return false;
    return true;
  }

  size_t count_ = 0;
  std::vector<std::vector<bool>> before_;
  std::map<LifeOf, std::vector<size_t>> lives_;
};

struct BufferTouches {
  Touches touches;
  int pieces = 0;
};

BufferTouches touches_of(const Schedule& schedule) {
  BufferTouches result;
  std::map<std::pair<RegionKind, int>, int> pieces;
  for (const Operation& operation : schedule.operations) {
    auto& list = result.touches.emplace_back();
    const auto add = [&](const Region& region, bool writes) {
      if (region.kind == RegionKind::kParameterShard) return;
      const int next = static_cast<int>(pieces.size());
      list.push_back({pieces.try_emplace({region.kind, region.index}, next).first->second, writes});
    };
    for (const Region& region : operation.reads) add(region, false);
    for (const Region& region : operation.writes) add(region, true);
  }
  result.pieces = static_cast<int>(pieces.size());
  return result;
}

TEST(Lifetimes, AreWhatTheDefinitionSaysInRandomSteps) {
  std::array<int, 2> answers{};
  int in_list_order_only = 0, handed_over = 0;
  for (unsigned seed = 0; seed < 1500; ++seed) {
    const Schedule schedule = make_random_step(seed).schedule;
    const Waits waits = derive_waits(schedule);
    const BufferTouches touched = touches_of(schedule);
    const StepOrder order = order_of(schedule, waits);
    const auto lives = find_lives(schedule, order, touched.touches, touched.pieces);
    const Unrolled unrolled(schedule, waits, touched.touches);
    for (int a = 0; a < touched.pieces; ++a)
      for (int b = 0; b < a; ++b) {
        const bool shared = may_share(*lives[a], *lives[b], order);
        ASSERT_EQ(shared, unrolled.may_share(a, b)) << "seed " << seed << " pieces " << a << " and " << b;
        ASSERT_EQ(shared, may_share(*lives[b], *lives[a], order)) << "seed " << seed;
        ++answers[shared];
        const auto& [first, second] =
            std::minmax(*lives[a], *lives[b], [](const Life& x, const Life& y) { return x.first < y.first; });
        const bool apart = first.last < second.first && second.last < first.first + order.operations;
        in_list_order_only += apart && !shared;
        handed_over += shared && second.last >= 2 * order.operations;
      }
  }
  // The cases that simpler rules would get wrong are there.
  EXPECT_GT(answers[false], 20000);
  EXPECT_GT(answers[true], 20000);
  EXPECT_GT(in_list_order_only, 5000) << "apart in the list, but not ordered";
  EXPECT_GT(handed_over, 500) << "shared by a life that goes on in the next step";
}

// Largest weight of pieces no two of which may share, by trying all sets.
int64_t largest_clique(const std::vector<Life>& lives, const std::vector<int64_t>& bytes,
                       const StepOrder& order) {
  int64_t most = 0;
  for (unsigned set = 0; set < 1U << lives.size(); ++set) {
    int64_t sum = 0;
    bool clique = true;
    for (size_t a = 0; a < lives.size() && clique; ++a) {
      if (!(set >> a & 1U)) continue;
      sum += bytes[a];
      for (size_t b = 0; b < a; ++b) clique &= !(set >> b & 1U) || !may_share(lives[a], lives[b], order);
    }
    if (clique) most = std::max(most, sum);
  }
  return most;
}

TEST(Lifetimes, LiveBytesAreABoundAndOftenTheBestOne) {
  int equal = 0, found = 0;
  for (unsigned seed = 0; seed < 600; ++seed) {
    const Schedule schedule = make_random_step(seed).schedule;
    const BufferTouches touched = touches_of(schedule);
    const StepOrder order = order_of(schedule, derive_waits(schedule));
    std::vector<Life> lives;
    std::vector<int64_t> bytes;
    for (const auto& life : find_lives(schedule, order, touched.touches, touched.pieces)) {
      if (lives.size() == 10) break;
      lives.push_back(*life);
      bytes.push_back(100 + static_cast<int64_t>(lives.size()) * 37);
    }
    const int64_t clique = largest_clique(lives, bytes, order);
    const int64_t live = live_bytes(lives, bytes, order);
    ASSERT_LE(live, clique) << "seed " << seed;
    if (!bytes.empty()) {
      ASSERT_GE(live, *std::max_element(bytes.begin(), bytes.end())) << "seed " << seed;
    }
    equal += live == clique;
    ++found;
  }
  EXPECT_GT(equal, found / 3);
}

}  // namespace
}  // namespace minillm::shard
