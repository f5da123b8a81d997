#include "kernels/cast.h"

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

TEST(Cast, RoundsToNearestEven) {
  for (const DType in_type : kAllTypes)
    for (const DType out_type : kAllTypes)
      for (const int64_t count : {0, 1, 7, 8, 33, 1025, 4096, 9001})
        for (const int64_t offset : {0, 1, 2}) {
          const std::vector<float> values = rounded(normal_values(count, 1), in_type);
          const Tensor in(in_type, values), out(out_type, count, offset);
          cast({.out = out.data(), .in = in.data(), .count = count, .out_type = out_type, .in_type = in_type},
               nullptr);
          expect_same_bits("cast", out.values(), rounded(values, out_type));
        }
}

TEST(Cast, Trap05_MisalignedViews) {
  constexpr int64_t kCount = 4100;
  const std::vector<float> values = normal_values(kCount, 2);
  for (const int64_t in_offset : {0, 1, 2, 3, 4})
    for (const int64_t out_offset : {0, 1, 2, 3, 4, 6, 8}) {
      const Tensor in(DType::kFp32, values, in_offset), out(DType::kBf16, kCount, out_offset);
      cast({.out = out.data(), .in = in.data(), .count = kCount}, nullptr);
      expect_same_bits("to bf16", out.values(), rounded(values, DType::kBf16));
      const Tensor back(DType::kFp32, kCount, in_offset);
      cast({.out = back.data(),
            .in = out.data(),
            .count = kCount,
            .out_type = DType::kFp32,
            .in_type = DType::kBf16},
           nullptr);
      expect_same_bits("to fp32", back.values(), rounded(values, DType::kBf16));
    }
}

TEST(Cast, Repeatable) {
  const Tensor in(DType::kFp32, normal_values(3000, 3));
  expect_repeatable("cast", [&] {
    const Tensor out(DType::kBf16, 3000);
    cast({.out = out.data(), .in = in.data(), .count = 3000}, nullptr);
    return out.read();
  });
}

TEST(Cast, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  // Ties to even, below and above; the largest fp32, which rounds to infinity; the smallest denormal.
  const std::vector<float> values = {
      0.0f, -0.0f, infinity, -infinity, 1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 0x1.fffffep127f, 0x1p-149f, NAN};
  const std::vector<float> expected = {0.0f,     -0.0f, infinity, -infinity, 1, 1 + 4 * 0x1p-8f,
                                       infinity, 0.0f,  NAN};
  const int64_t count = std::ssize(values);
  const Tensor in(DType::kFp32, values), out(DType::kBf16, count);
  cast(
      {.out = out.data(), .in = in.data(), .count = count, .out_type = DType::kBf16, .in_type = DType::kFp32},
      nullptr);
  const std::vector<float> result = out.values();
  for (int64_t i = 0; i + 1 < count; ++i) {
    EXPECT_EQ(result[i], expected[i]) << i;
    EXPECT_EQ(std::signbit(result[i]), std::signbit(expected[i])) << i;
  }
  EXPECT_TRUE(std::isnan(result.back()));
}

TEST(Cast, Cost) {
  EXPECT_EQ(cast_cost({.count = int64_t{1} << 33}).bytes, 6 * (int64_t{1} << 33));
}

}  // namespace
}  // namespace minillm::kernels::testing
