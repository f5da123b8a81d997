#include "kernels/accumulate.h"

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

/// `values` on top of `before`, or instead of it.
std::vector<float> run(DType type, const std::vector<float>& values, const std::vector<float>& before,
                       bool add, int64_t offset = 0, int64_t in_offset = 0) {
  const Tensor in(type, values, in_offset), out(DType::kFp32, before, offset);
  accumulate({.out = out.as<float>(),
              .in = in.data(),
              .count = std::ssize(values),
              .in_type = type,
              .accumulate = add},
             nullptr);
  expect_same_bits("in", in.values(), values);
  return out.values();
}

std::vector<float> sums(const std::vector<float>& values, std::vector<float> before) {
  for (size_t i = 0; i < before.size(); ++i) before[i] += values[i];
  return before;
}

// Around a thread's vector and a block's tile, at every alignment of either side. One fp32 addition is exact
// to the bit, so nothing less is asked for; a rounding to bf16 anywhere would be seen.
TEST(Accumulate, Trap05_AddsOrReplacesAtAnyAlignment) {
  for (const DType type : kAllTypes)
    for (const int64_t count : {0, 1, 3, 4, 7, 33, 1025, 4096, 4101, 9001})
      for (const int64_t offset : {0, 1, 2})
        for (const int64_t in_offset : {0, 1, 2, 4}) {
          const std::vector<float> values = rounded(normal_values(count, 1), type);
          const std::vector<float> before = normal_values(count, 2, 100), expected = sums(values, before);
          expect_same_bits("sum", run(type, values, before, true, offset, in_offset), expected);
          expect_same_bits("copy", run(type, values, before, false, offset, in_offset), values);
          if (count > 100) {
            EXPECT_NE(rounded(expected, DType::kBf16), expected) << "planted: the values cannot tell";
          }
        }
}

// 256 micro-batches of 1 and one more: a sum in bf16 stops at 256.
TEST(Accumulate, Trap14_SumsThatBf16CannotHold) {
  const std::vector<float> ones(100, 1.0f);
  std::vector<float> total = run(DType::kBf16, ones, std::vector<float>(100, NAN), false);
  for (int i = 1; i < 257; ++i) total = run(DType::kBf16, ones, total, true);
  EXPECT_EQ(total, std::vector<float>(100, 257.0f));
}

TEST(Accumulate, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> before = {-0.0f, 0.0f, infinity, 1.0f, NAN},
                           values = {-0.0f, -0.0f, -infinity, infinity, 1};
  const std::vector<float> sum = run(DType::kBf16, values, before, true);
  expect_same_bits("zeros", {sum[0], sum[1]}, std::vector<float>{-0.0f, 0.0f});
  EXPECT_TRUE(std::isnan(sum[2]));
  EXPECT_EQ(sum[3], infinity);
  EXPECT_TRUE(std::isnan(sum[4]));
  expect_same_bits("copy", run(DType::kBf16, values, before, false), values);
}

TEST(Accumulate, Repeatable) {
  const std::vector<float> values = rounded(normal_values(5000, 3), DType::kBf16),
                           before = normal_values(5000, 4);
  expect_repeatable("accumulate", [&] { return run(DType::kBf16, values, before, true); });
}

TEST(Accumulate, Trap01_SizesBeyond32Bits) {
  constexpr int64_t kCount = int64_t{1} << 33;
  EXPECT_EQ(accumulate_cost({.count = kCount, .in_type = DType::kBf16, .accumulate = true}).bytes,
            10 * kCount);
  EXPECT_EQ(accumulate_cost({.count = kCount, .in_type = DType::kFp32, .accumulate = true}).bytes,
            12 * kCount);
  EXPECT_EQ(accumulate_cost({.count = kCount, .in_type = DType::kBf16}).bytes, 6 * kCount);
  EXPECT_EQ(accumulate_cost({.count = kCount, .accumulate = true}).flops, kCount);
  EXPECT_EQ(accumulate_cost({.count = kCount}).flops, 0);
}

}  // namespace
}  // namespace minillm::kernels::testing
