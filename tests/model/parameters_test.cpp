// The segments of units.
#include "model/parameters.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/model/model_rig.h"

namespace minillm::model {
namespace {

TEST(Units, HaveSegments) {
  const shard::Layout layout = shard::make_layout(units(test::small_model(true)), 3);
  ASSERT_EQ(layout.units.size(), 4u);
  EXPECT_EQ(layout.units.front().segments.size(), 1u);
  for (const size_t unit : {1, 2}) {
    EXPECT_EQ(layout.units[unit].segments.size(), 3u);
    std::vector<std::vector<std::string>> tensors(3);
    const std::string prefix = "layers." + std::to_string(unit - 1) + ".";
    for (const shard::Slice& slice : layout.units[unit].slices) {
      ASSERT_TRUE(slice.name.starts_with(prefix)) << slice.name;
      tensors[static_cast<size_t>(slice.segment)].push_back(slice.name.substr(prefix.size()));
    }
    EXPECT_EQ(tensors, (std::vector<std::vector<std::string>>{
                           {"norm1.weight", "attn.in_proj_weight", "attn.in_proj_bias"},
                           {"attn.out_proj.weight", "attn.out_proj.bias"},
                           {"norm2.weight", "ffn.up.weight", "ffn.down.weight"}}));
  }
}

// The final norm's gradient is known last, so it is reduced by itself; without it nothing is.
TEST(Units, HeadsHaveASegmentForTheFinalNorm) {
  const auto tensors = [](bool final_norm) {
    const std::vector<shard::UnitSpec> all = units(test::small_model(final_norm));
    std::vector<std::pair<std::string, int>> found;
    for (const shard::TensorSpec& tensor : all.back().tensors)
      found.emplace_back(tensor.name, tensor.segment);
    return found;
  };
  using Tensors = std::vector<std::pair<std::string, int>>;
  EXPECT_EQ(tensors(true), (Tensors{{"final_norm.weight", kFinalNorm}, {"head.weight", kProjection}}));
  EXPECT_EQ(tensors(false), (Tensors{{"head.weight", 0}}));
}

}  // namespace
}  // namespace minillm::model
