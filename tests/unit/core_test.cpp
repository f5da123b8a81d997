#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "core/checked.h"
#include "core/edit_distance.h"
#include "core/error.h"
#include "core/number.h"
#include "core/philox.h"

namespace minillm {
namespace {

struct KnownAnswer {
  uint32_t counter[4];
  uint32_t key[2];
  uint32_t expected[4];
};

// philox4x32-10 in Random123's kat_vectors: zeros, ones, digits of pi.
constexpr KnownAnswer kKnownAnswers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

uint64_t join(uint32_t low, uint32_t high) {
  return uint64_t{high} << 32 | low;
}

TEST(Philox, KnownAnswers) {
  for (const KnownAnswer& answer : kKnownAnswers) {
    const PhiloxWords words =
        philox(join(answer.key[0], answer.key[1]), join(answer.counter[2], answer.counter[3]),
               join(answer.counter[0], answer.counter[1]));
    for (int i = 0; i < 4; ++i) EXPECT_EQ(words.word[i], answer.expected[i]);
  }
}

TEST(Philox, UniformStaysBelowOne) {
  EXPECT_EQ(uniform_from_bits(0), 0.0f);
  EXPECT_EQ(uniform_from_bits(0xffffffff), 1.0f - 0x1p-24f);
}

TEST(Checked, ExactDivision) {
  EXPECT_EQ(div_exact(12, 4), 3);
  EXPECT_EQ(div_exact(0, 4), 0);
  EXPECT_THROW(div_exact(13, 4), InternalError);
  EXPECT_THROW(div_exact(12, 0), InternalError);
  EXPECT_THROW(div_exact(12, -4), InternalError);
}

TEST(Checked, Rounding) {
  EXPECT_EQ(ceil_div(0, 8), 0);
  EXPECT_EQ(ceil_div(9, 8), 2);
  EXPECT_EQ(round_up(9, 8), 16);
  EXPECT_EQ(round_up(16, 8), 16);
}

TEST(Checked, Narrowing) {
  EXPECT_EQ(narrow<int>(int64_t{-5}), -5);
  EXPECT_EQ(narrow<uint8_t>(255), 255);
  EXPECT_THROW(narrow<uint8_t>(256), InternalError);
  EXPECT_THROW(narrow<uint32_t>(-1), InternalError);
  EXPECT_THROW(narrow<int>(std::numeric_limits<int64_t>::max()), InternalError);
}

TEST(EditDistance, CountsChanges) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("steps", "stps"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("sitting", "kitten"), 3);
}

TEST(ParseNumber, TakesDecimalNotationWhole) {
  EXPECT_EQ(parse_number<int64_t>("007"), 7);
  EXPECT_EQ(parse_number<int64_t>("-9223372036854775808"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(parse_number<double>("1e3"), 1000.0);
  for (const char* text : {"", " 1", "1 ", "+1", "0x10", "1e3", "1.0", "nan", "99999999999999999999"})
    EXPECT_FALSE(parse_number<int64_t>(text)) << text;
  for (const char* text : {"", "nan", "inf", "-inf", "1e400", "0x1p3", "1,5", "1e"})
    EXPECT_FALSE(parse_number<double>(text)) << text;
  EXPECT_FALSE(parse_number<uint64_t>("-1"));
  EXPECT_FALSE(parse_number<int64_t>(std::string_view("1\0", 2)));
}

}  // namespace
}  // namespace minillm
