#include "shard/layout.h"

#include <algorithm>
#include <set>

#include "core/checked.h"
#include "core/error.h"

namespace minillm::shard {
namespace {

int64_t element_count(const UnitSpec& unit, const TensorSpec& tensor) {
  int64_t elements = 1;
  for (int64_t dimension : tensor.shape) {
    if (dimension < 1)
      throw InternalError("make_layout: tensor '" + tensor.name + "' of unit '" + unit.name +
                          "' has a dimension of " + std::to_string(dimension) + "; dimensions are 1 or more");
    elements *= dimension;
  }
  return elements;
}

// Ends the segment that holds the flat buffer from its offset to `end`.
void close_segment(UnitLayout& unit, int64_t end, int world) {
  Segment& segment = unit.segments.back();
  segment.used_elements = round_up(end - segment.offset, kSliceAlignment);
  segment.padded_elements = round_up(end - segment.offset, world * kSliceAlignment);
  segment.shard_elements = div_exact(segment.padded_elements, world);
  segment.shard_offset = unit.shard_elements;
  unit.padded_elements += segment.padded_elements;
  unit.shard_elements += segment.shard_elements;
}

void check_tensor(const UnitSpec& unit, const TensorSpec& tensor, int64_t elements, int last_segment) {
  const std::string named = "make_layout: tensor '" + tensor.name + "' of unit '" + unit.name + "'";
  if (tensor.reserved != 0 && tensor.reserved < elements)
    throw InternalError(named + " reserves " + std::to_string(tensor.reserved) + " of its " +
                        std::to_string(elements) + " elements");
  if (tensor.segment != last_segment && tensor.segment != last_segment + 1)
    throw InternalError(named + " is in segment " + std::to_string(tensor.segment) +
                        " after one in segment " + std::to_string(last_segment));
}

UnitLayout make_unit(const UnitSpec& spec, int world) {
  if (spec.tensors.empty())
    throw InternalError("make_layout: unit '" + spec.name + "' has no tensors; leave it out instead");
  UnitLayout unit;
  unit.name = spec.name;
  unit.slot_group = spec.slot_group;
  std::set<std::string> names;
  int64_t end = 0;
  for (const TensorSpec& tensor : spec.tensors) {
    if (!names.insert(tensor.name).second)
      throw InternalError("make_layout: unit '" + spec.name + "' has two tensors named '" + tensor.name +
                          "'");
    const int64_t elements = element_count(spec, tensor);
    check_tensor(spec, tensor, elements, static_cast<int>(unit.segments.size()) - 1);
    if (tensor.segment == std::ssize(unit.segments)) {
      if (!unit.segments.empty()) close_segment(unit, end, world);
      unit.segments.push_back({.offset = unit.padded_elements});
      end = unit.padded_elements;
    }
    const int64_t offset = round_up(end, kSliceAlignment);
    unit.slices.push_back({tensor.name, tensor.shape, offset, elements, tensor.segment});
    unit.elements += elements;
    end = offset + std::max(elements, tensor.reserved);
  }
  close_segment(unit, end, world);
  return unit;
}

}  // namespace

int64_t Layout::elements() const {
  int64_t sum = 0;
  for (const UnitLayout& unit : units) sum += unit.elements;
  return sum;
}

int64_t Layout::shard_elements() const {
  int64_t sum = 0;
  for (const UnitLayout& unit : units) sum += unit.shard_elements;
  return sum;
}

int Layout::most_segments() const {
  size_t most = 0;
  for (const UnitLayout& unit : units) most = std::max(most, unit.segments.size());
  return static_cast<int>(most);
}

std::span<const Segment> segments_of(const UnitLayout& unit, int segment) {
  const std::span<const Segment> all(unit.segments);
  return segment < 0 ? all : all.subspan(static_cast<size_t>(segment), 1);
}

PlaceParts::PlaceParts(const Layout& layout, Of what) : what_(what) {
  std::set<int64_t> starts;
  for (const UnitLayout& unit : layout.units)
    for (const Segment& segment : unit.segments)
      starts.insert(what == Of::kShards ? segment.shard_offset : segment.offset);
  starts_.assign(starts.begin(), starts.end());
}

PlaceParts::Range PlaceParts::of(const UnitLayout& unit, int segment) const {
  const std::span<const Segment> segments = segments_of(unit, segment);
  const Segment &front = segments.front(), &back = segments.back();
  const bool shards = what_ == Of::kShards;
  const int64_t begin = shards ? front.shard_offset : front.offset;
  const int64_t end = shards ? back.shard_offset + back.shard_elements : back.offset + back.padded_elements;
  const auto parts_before = [&](int64_t element) {
    return static_cast<int>(std::ranges::lower_bound(starts_, element) - starts_.begin());
  };
  return {parts_before(begin), parts_before(end)};
}

std::vector<std::string> Layout::unit_names() const {
  std::vector<std::string> names;
  for (const UnitLayout& unit : units) names.push_back(unit.name);
  return names;
}

Layout make_layout(const std::vector<UnitSpec>& units, int world) {
  if (world < 1)
    throw InternalError("make_layout: a world of " + std::to_string(world) + " ranks; 1 or more are allowed");
  Layout layout;
  layout.world = world;
  std::set<std::string> names;
  for (const UnitSpec& unit : units) {
    if (!names.insert(unit.name).second)
      throw InternalError("make_layout: two units are named '" + unit.name + "'");
    layout.units.push_back(make_unit(unit, world));
  }
  return layout;
}

ShardPiece shard_piece(const UnitLayout& unit, const Slice& slice, int rank) {
  const Segment& segment = unit.segments[static_cast<size_t>(slice.segment)];
  const int64_t shard_begin = segment.offset + rank * segment.shard_elements;
  const int64_t begin = std::max(slice.offset, shard_begin);
  const int64_t end = std::min(slice.offset + slice.elements, shard_begin + segment.shard_elements);
  if (begin >= end) return {};
  return {begin - slice.offset, segment.shard_offset + begin - shard_begin, end - begin};
}

std::vector<float> collect_slice(const UnitLayout& unit, const Slice& slice, std::span<const float> shards) {
  std::vector<float> whole(static_cast<size_t>(slice.elements));
  const int world = static_cast<int>(div_exact(std::ssize(shards), unit.shard_elements));
  for (int rank = 0; rank < world; ++rank) {
    const ShardPiece piece = shard_piece(unit, slice, rank);
    const auto from = shards.begin() + rank * unit.shard_elements + piece.shard_offset;
    std::copy(from, from + piece.count, whole.begin() + piece.tensor_offset);
  }
  return whole;
}

}  // namespace minillm::shard
