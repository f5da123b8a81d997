#include "shard/placement.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace minillm::shard {
namespace {

// Limits of the search for a better arrangement, in rounds and in pairs of pieces looked at: a few
// milliseconds.
constexpr int64_t kMostRounds = 64;
constexpr int64_t kMostPairs = 3'000'000;

// Which pieces may not share, by row: decided once, asked for in every order.
class Conflicts {
 public:
  Conflicts(const std::vector<Life>& lives, const StepOrder& order)
      : count_(lives.size()), conflicts_(count_ * count_) {
    for (size_t a = 0; a < count_; ++a)
      for (size_t b = 0; b < a; ++b)
        if (!may_share(lives[a], lives[b], order))
          conflicts_[a * count_ + b] = conflicts_[b * count_ + a] = 1;
  }
  bool between(int a, int b) const {
    return conflicts_[static_cast<size_t>(a) * count_ + static_cast<size_t>(b)];
  }

 private:
  size_t count_ = 0;
  std::vector<uint8_t> conflicts_;
};

struct Placed {
  int piece = 0;
  int64_t begin = 0, end = 0;
};

// The smallest gap that is large enough between the placed pieces that this one conflicts with; above all of
// them when there is none. `placed` is in the order of `begin`.
int64_t best_fit(int piece, int64_t bytes, const std::vector<Placed>& placed, const Conflicts& conflicts) {
  int64_t best = -1, smallest_gap = std::numeric_limits<int64_t>::max(), gap_begin = 0;
  for (const Placed& other : placed) {
    if (!conflicts.between(piece, other.piece)) continue;
    const int64_t gap = other.begin - gap_begin;
    if (gap >= bytes && gap < smallest_gap) {
      best = gap_begin;
      smallest_gap = gap;
    }
    gap_begin = std::max(gap_begin, other.end);
  }
  return best >= 0 ? best : gap_begin;
}

Arrangement place_in_order(const std::vector<int>& pieces, const std::vector<int64_t>& bytes,
                           const Conflicts& conflicts) {
  Arrangement result;
  result.offsets.resize(bytes.size());
  std::vector<Placed> placed;
  placed.reserve(pieces.size());
  for (int piece : pieces) {
    if (bytes[piece] == 0) continue;  // at 0, in nobody's way
    const int64_t begin = best_fit(piece, bytes[piece], placed, conflicts);
    const int64_t end = begin + bytes[piece];
    const auto above =
        std::upper_bound(placed.begin(), placed.end(), begin,
                         [](int64_t offset, const Placed& other) { return offset < other.begin; });
    placed.insert(above, {piece, begin, end});
    result.offsets[piece] = begin;
    result.bytes = std::max(result.bytes, end);
  }
  return result;
}

// Each has models for which it is the best of them.
std::vector<std::vector<int>> orders(const std::vector<Life>& lives, const std::vector<int64_t>& bytes) {
  const auto size = [&](int piece) { return static_cast<double>(bytes[piece]); };
  const auto length = [&](int piece) {
    return static_cast<double>(lives[piece].last - lives[piece].first + 1);
  };
  const std::vector<std::function<double(int)>> keys = {
      size,
      [&](int piece) { return size(piece) * length(piece); },
      length,
      [&](int piece) { return -static_cast<double>(lives[piece].first); },
  };
  std::vector<int> largest_first(bytes.size());
  std::iota(largest_first.begin(), largest_first.end(), 0);
  std::vector<std::vector<int>> result;
  for (const auto& key : keys) {
    // Of equal ones the largest first.
    std::vector<int>& order = result.emplace_back(result.empty() ? largest_first : result.front());
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
  }
  return result;
}

}  // namespace

Arrangement arrange(const std::vector<Life>& lives, const std::vector<int64_t>& bytes,
                    const StepOrder& order) {
  const Conflicts conflicts(lives, order);
  const int64_t bound = live_bytes(lives, bytes, order);
  Arrangement best;
  best.bytes = std::numeric_limits<int64_t>::max();
  std::vector<int> pieces;
  for (std::vector<int>& candidate : orders(lives, bytes)) {
    Arrangement found = place_in_order(candidate, bytes, conflicts);
    if (found.bytes >= best.bytes) continue;
    best = std::move(found);
    pieces = std::move(candidate);
    if (best.bytes == bound) break;
  }
  // What lies on top was placed too late to find a gap: place it first, again and again.
  const int64_t pairs = std::max<int64_t>(1, std::ssize(lives) * std::ssize(lives));
  const int64_t rounds = std::min(kMostRounds, kMostPairs / pairs);
  Arrangement last = best;
  for (int64_t round = 0; round < rounds && best.bytes > bound; ++round) {
    std::stable_partition(pieces.begin(), pieces.end(),
                          [&](int piece) { return last.offsets[piece] + bytes[piece] == last.bytes; });
    last = place_in_order(pieces, bytes, conflicts);
    if (last.bytes < best.bytes) best = last;
  }
  best.live_bytes = bound;
  return best;
}

}  // namespace minillm::shard
