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
    const int64_t offset = round_up(end, kSliceAlignment);
    unit.slices.push_back({tensor.name, tensor.shape, offset, elements});
    unit.elements += elements;
    if (tensor.reserved != 0 && tensor.reserved < elements)
      throw InternalError("make_layout: tensor '" + tensor.name + "' of unit '" + unit.name + "' reserves " +
                          std::to_string(tensor.reserved) + " of its " + std::to_string(elements) +
                          " elements");
    end = offset + std::max(elements, tensor.reserved);
  }
  unit.used_elements = round_up(end, kSliceAlignment);
  unit.padded_elements = round_up(end, world * kSliceAlignment);
  unit.shard_elements = div_exact(unit.padded_elements, world);
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
  const int64_t shard_begin = rank * unit.shard_elements;
  const int64_t begin = std::max(slice.offset, shard_begin);
  const int64_t end = std::min(slice.offset + slice.elements, shard_begin + unit.shard_elements);
  if (begin >= end) return {};
  return {begin - slice.offset, begin - shard_begin, end - begin};
}

}  // namespace minillm::shard
