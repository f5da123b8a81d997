// Units and their flat layout: which elements of which tensor a rank owns.
//
// A unit's parameters lie one after another in one flat buffer. Each slice starts at a multiple of
// kSliceAlignment elements (256 bytes in bf16, 512 in fp32, so that the layout does not depend on the type),
// and the tensors of a segment are padded together to a multiple of world × kSliceAlignment; rank r owns the
// r-th equal piece of each segment, and its shard of the unit is these pieces one after another. A unit of
// one segment moves in one collective, others in one group of them, and the weights are views of the gathered
// buffer. Segments exist so that a unit's gradients can be reduced, and its parameters updated and gathered
// again, in parts. Rejected: sharding each tensor by rows (FSDP2), which needs a copy-out after every gather
// and pads uneven dimensions per tensor. Padding is zero, stays zero, and counts in no norm, checkpoint or
// parameter total.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace minillm::shard {

inline constexpr int64_t kSliceAlignment = 128;

/// A tensor as the model declares it.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  /// Elements that the flat buffer keeps for the tensor, those after its own being padding: 0, or at least as
  /// many as it has.
  int64_t reserved = 0;
  /// Segment of the unit that it belongs to; segments are numbered from 0 in the order of the tensors.
  int segment = 0;
};

/// A group of tensors that is gathered and reduced together.
struct UnitSpec {
  std::string name;
  std::vector<TensorSpec> tensors;
  /// Units of one group share a set of slots; 0 for the blocks, 1 for the embedding and the head.
  int slot_group = 0;
};

/// Where a tensor lies in its unit's flat buffer, in elements.
struct Slice {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset = 0;
  int64_t elements = 0;
  int segment = 0;
};

/// A part of a unit's flat buffer that is sharded on its own, in elements.
struct Segment {
  int64_t offset = 0;         ///< in the flat buffer
  int64_t used_elements = 0;  ///< where its last slice ends, from `offset`, aligned; the same in every world
  int64_t padded_elements = 0;  ///< world × shard_elements
  int64_t shard_offset = 0;     ///< in a rank's shard of the unit
  int64_t shard_elements = 0;
  friend bool operator==(const Segment&, const Segment&) = default;
};

struct UnitLayout {
  std::string name;
  int slot_group = 0;
  std::vector<Slice> slices;
  std::vector<Segment> segments;
  int64_t elements = 0;         ///< sum of the slices' elements, without padding
  int64_t padded_elements = 0;  ///< length of the flat buffer: world × shard_elements
  int64_t shard_elements = 0;
};

struct Layout {
  int world = 1;
  std::vector<UnitLayout> units;

  int64_t elements() const;        ///< parameters of the model
  int64_t shard_elements() const;  ///< elements that one rank owns, padding included
  int most_segments() const;       ///< of any unit
  std::vector<std::string> unit_names() const;
};

/// The segments that `segment` names: itself, or all of the unit for -1.
std::span<const Segment> segments_of(const UnitLayout& unit, int segment);

/// The parts of a place that units take in turn, each from its beginning. It is cut wherever a segment of any
/// unit begins, so that segments of two units overlap exactly where they have a part in common; where all
/// units that have several segments have the same, the parts are these.
class PlaceParts {
 public:
  enum class Of : uint8_t { kFlatBuffers, kShards };
  PlaceParts(const Layout& layout, Of what);

  struct Range {
    int first = 0;
    int end = 0;
    friend bool operator==(const Range&, const Range&) = default;
  };
  /// The parts that a segment of a unit lies in; -1: all its segments.
  Range of(const UnitLayout& unit, int segment) const;

 private:
  Of what_;
  std::vector<int64_t> starts_;  // of the parts, in order; the last one has no end
};

/// Throws InternalError for world < 1, an empty unit, a tensor with a dimension < 1, less reserved than it
/// has, a segment out of order or a repeated name.
Layout make_layout(const std::vector<UnitSpec>& units, int world);

/// The part of a slice that lies in rank `rank`'s shard; count 0 when none does.
struct ShardPiece {
  int64_t tensor_offset = 0;  ///< first element within the tensor
  int64_t shard_offset = 0;   ///< first element within the rank's shard of the unit
  int64_t count = 0;
};
ShardPiece shard_piece(const UnitLayout& unit, const Slice& slice, int rank);

/// A slice put together from the shards of all ranks of a world, [world · shard_elements] in rank order:
/// slice.elements values.
std::vector<float> collect_slice(const UnitLayout& unit, const Slice& slice, std::span<const float> shards);

}  // namespace minillm::shard
