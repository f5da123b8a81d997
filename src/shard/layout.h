// Units and their flat layout: which elements of which tensor a rank owns.
//
// A unit's parameters lie one after another in one flat buffer. Each slice starts at a multiple of
// kSliceAlignment elements (256 bytes in bf16, 512 in fp32, so that the layout does not depend on the type),
// and the whole is padded to a multiple of world × kSliceAlignment; rank r owns the r-th equal piece. One
// collective per unit moves it, and the weights are views of the gathered buffer. Rejected: sharding each
// tensor by rows (FSDP2), which needs a copy-out after every gather and pads uneven dimensions per tensor.
// Padding is zero, stays zero, and counts in no norm, checkpoint or parameter total.
#pragma once

#include <cstdint>
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
};

struct UnitLayout {
  std::string name;
  int slot_group = 0;
  std::vector<Slice> slices;
  int64_t elements = 0;         ///< sum of the slices' elements, without padding
  int64_t used_elements = 0;    ///< where the last slice ends, aligned; the same in every world
  int64_t padded_elements = 0;  ///< length of the flat buffer: world × shard_elements
  int64_t shard_elements = 0;
};

struct Layout {
  int world = 1;
  std::vector<UnitLayout> units;

  int64_t elements() const;        ///< parameters of the model
  int64_t shard_elements() const;  ///< elements that one rank owns, padding included
  std::vector<std::string> unit_names() const;
};

/// Throws InternalError for world < 1, an empty unit, a tensor with a dimension < 1, less reserved than it
/// has or a repeated name.
Layout make_layout(const std::vector<UnitSpec>& units, int world);

/// The part of a slice that lies in rank `rank`'s shard; count 0 when none does.
struct ShardPiece {
  int64_t tensor_offset = 0;  ///< first element within the tensor
  int64_t shard_offset = 0;   ///< first element within the rank's shard of the unit
  int64_t count = 0;
};
ShardPiece shard_piece(const UnitLayout& unit, const Slice& slice, int rank);

}  // namespace minillm::shard
