#include "kernels/split.h"

#include "tests/kernels/masters.h"

namespace minillm::kernels::testing {
namespace {

uint32_t bits_of(float value) {
  return std::bit_cast<uint32_t>(value);
}

// Every upper half with the lower halves around which something changes, both signs, infinities included.
TEST(SplitFloat, LosesNothingAndRoundsToNearest) {
  for (uint32_t upper = 0; upper < 0x10000; ++upper)
    for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = upper << 16 | lower;
      const float value = std::bit_cast<float>(bits);
      const SplitFloat halves = split_float(bits);
      const float rounded_value = bf16_to_float(halves.upper);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(rounded_value) && std::isnan(std::bit_cast<float>(join_float(halves))))
            << bits;
        continue;
      }
      ASSERT_EQ(join_float(halves), bits);
      const bool middle = lower == 0x8000;
      ASSERT_EQ(halves.upper, middle ? upper + 1 : float_to_bf16(value)) << bits;
    }
}

TEST(Split, HalvesOfEachElement) {
  for (const int64_t count : {0, 1, 255, 257, 4099}) {
    const std::vector<float> values = normal_values(count, 1);
    const Tensor in(DType::kFp32, values), upper(DType::kBf16, count), lower(DType::kBf16, count);
    split(
        {.upper = upper.as<uint16_t>(), .lower = lower.as<uint16_t>(), .in = in.as<float>(), .count = count},
        nullptr);
    const Masters expected(values, true);
    expect_same_bits("masters", expected.values(), values);
    expect_same_bits("upper", upper.values(), expected.parameters());
    const std::vector<std::byte> rest = lower.read();
    for (int64_t i = 0; i < count; ++i) {
      uint16_t found = 0;
      std::memcpy(&found, rest.data() + i * sizeof(found), sizeof(found));
      ASSERT_EQ(found, bits_of(values[i]) & 0xffff) << i;
    }
  }
}

}  // namespace
}  // namespace minillm::kernels::testing
