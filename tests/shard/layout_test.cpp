#include "shard/layout.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "fixtures.h"

namespace minillm::shard {
namespace {

TEST(Layout, SlicesAreAlignedInOrderAndDisjoint) {
  const Layout layout = make_layout({{"u", {{"a", {3, 5}}, {"b", {128}}, {"c", {129}}, {"d", {}}}, 4}}, 2);
  const UnitLayout& unit = layout.units[0];
  ASSERT_EQ(unit.slices.size(), 4u);
  EXPECT_EQ(unit.slot_group, 4);
  const std::vector<int64_t> offsets = {0, 128, 256, 512}, elements = {15, 128, 129, 1};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(unit.slices[i].offset, offsets[i]) << i;
    EXPECT_EQ(unit.slices[i].elements, elements[i]) << i;
  }
  EXPECT_EQ(unit.elements, 15 + 128 + 129 + 1);
  EXPECT_EQ(unit.padded_elements, 768);
  EXPECT_EQ(unit.shard_elements, 384);
}

TEST(Layout, OffsetsDoNotDependOnTheWorld) {
  const Layout one = make_layout(make_units(3, 37), 1);
  for (int world : {2, 3, 4, 7}) {
    const Layout many = make_layout(make_units(3, 37), world);
    EXPECT_EQ(many.elements(), one.elements());
    int64_t shards = 0;
    for (size_t u = 0; u < one.units.size(); ++u) {
      for (size_t s = 0; s < one.units[u].slices.size(); ++s)
        EXPECT_EQ(many.units[u].slices[s].offset, one.units[u].slices[s].offset);
      EXPECT_EQ(many.units[u].padded_elements % (world * kSliceAlignment), 0);
      EXPECT_EQ(many.units[u].shard_elements * world, many.units[u].padded_elements);
      EXPECT_LT(many.units[u].padded_elements - one.units[u].padded_elements, world * kSliceAlignment);
      shards += many.units[u].shard_elements;
    }
    EXPECT_EQ(many.shard_elements(), shards);
  }
}

TEST(Layout, PartsOfPlacesAreTheSegmentsWhereOneKindOfUnitHasSome) {
  const Layout layout = make_layout(make_segmented_units(3, 20), 2);
  for (const auto of : {PlaceParts::Of::kFlatBuffers, PlaceParts::Of::kShards}) {
    const PlaceParts parts(layout, of);
    for (size_t unit : {1, 2, 3}) {
      EXPECT_EQ(parts.of(layout.units[unit], 0), (PlaceParts::Range{0, 1}));
      EXPECT_EQ(parts.of(layout.units[unit], 1), (PlaceParts::Range{1, 2}));
      EXPECT_EQ(parts.of(layout.units[unit], -1), (PlaceParts::Range{0, 2}));
    }
  }
}

// Of two units from the beginning of one place, element by element.
TEST(Layout, SegmentsHaveAPartInCommonWhereTheyOverlap) {
  int overlaps = 0, apart = 0;
  for (unsigned seed = 0; seed < 100; ++seed) {
    const Layout layout = make_random_case(seed).layout;
    for (const bool shards : {false, true}) {
      const PlaceParts parts(layout, shards ? PlaceParts::Of::kShards : PlaceParts::Of::kFlatBuffers);
      const auto extent = [&](const Segment& s) {
        return shards ? std::pair(s.shard_offset, s.shard_offset + s.shard_elements)
                      : std::pair(s.offset, s.offset + s.padded_elements);
      };
      for (const UnitLayout& a : layout.units)
        for (const UnitLayout& b : layout.units)
          for (int i = 0; i < std::ssize(a.segments); ++i)
            for (int j = 0; j < std::ssize(b.segments); ++j) {
              const auto [a_begin, a_end] = extent(a.segments[static_cast<size_t>(i)]);
              const auto [b_begin, b_end] = extent(b.segments[static_cast<size_t>(j)]);
              const PlaceParts::Range of_a = parts.of(a, i), of_b = parts.of(b, j);
              const bool common = of_a.first < of_b.end && of_b.first < of_a.end;
              const bool overlap = a_begin < b_end && b_begin < a_end;
              EXPECT_EQ(common, overlap) << "seed " << seed;
              ++(common ? overlaps : apart);
            }
    }
  }
  EXPECT_GT(overlaps, 1000);
  EXPECT_GT(apart, 1000);
}

TEST(Layout, PiecesCoverEveryElementOnce) {
  for (int world : {1, 2, 3, 4, 7})
    for (int64_t dim : {1, 5, 64, 131}) {
      const Layout layout = make_layout(make_units(2, dim), world);
      for (const UnitLayout& unit : layout.units) {
        std::vector<int> flat(static_cast<size_t>(unit.padded_elements));
        for (const Slice& slice : unit.slices) {
          std::vector<int> tensor(static_cast<size_t>(slice.elements));
          for (int rank = 0; rank < world; ++rank) {
            const ShardPiece piece = shard_piece(unit, slice, rank);
            ASSERT_GE(piece.count, 0);
            ASSERT_LE(piece.shard_offset + piece.count, unit.shard_elements);
            for (int64_t i = 0; i < piece.count; ++i) {
              ++tensor.at(static_cast<size_t>(piece.tensor_offset + i));
              const int64_t at = rank * unit.shard_elements + piece.shard_offset + i;
              EXPECT_EQ(at, slice.offset + piece.tensor_offset + i);
              ++flat.at(static_cast<size_t>(at));
            }
          }
          EXPECT_EQ(tensor, std::vector<int>(tensor.size(), 1)) << unit.name << " " << slice.name;
        }
        EXPECT_EQ(std::count(flat.begin(), flat.end(), 1), unit.elements);
        EXPECT_EQ(std::count(flat.begin(), flat.end(), 0), unit.padded_elements - unit.elements);
      }
    }
}

TEST(Layout, RefusesWhatCannotBeLaidOut) {
  const TensorSpec good{"w", {2}};
  EXPECT_THROW(make_layout({{"u", {good}}}, 0), InternalError);
  EXPECT_THROW(make_layout({{"u", {}}}, 1), InternalError);
  EXPECT_THROW(make_layout({{"u", {{"w", {2, 0}}}}}, 1), InternalError);
  EXPECT_THROW(make_layout({{"u", {good, good}}}, 1), InternalError);
  EXPECT_THROW(make_layout({{"u", {good}}, {"u", {good}}}, 1), InternalError);
  EXPECT_NO_THROW(make_layout({{"u", {good}}, {"v", {good}}}, 1));
}

}  // namespace
}  // namespace minillm::shard
