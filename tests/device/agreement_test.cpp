#include "comm/agreement.h"

#include <gtest/gtest.h>

namespace minillm::comm {
namespace {

using Statements = std::vector<Statement>;

/// What agree() finds when rank r states `ranks[r]`.
std::string found(const std::vector<Statements>& ranks) {
  std::vector<Statements> of_ranks;
  for (const Statements& mine : ranks) of_ranks.push_back(differences(ranks.front(), mine));
  return disagreement(ranks.front(), of_ranks);
}

void expect_lines(const std::string& text, const std::vector<std::string>& lines) {
  std::string wanted = "the ranks were not started alike:\n";
  for (const std::string& line : lines) wanted += "  " + line + "\n";
  EXPECT_EQ(text, wanted + "Start all with the same program, configuration and files");
}

TEST(Agreement, NothingIsSaidOfRanksThatAgree) {
  EXPECT_EQ(found({{{"a", "1"}, {"b", "2"}}}), "");
  EXPECT_EQ(found({{{"a", "1"}, {"b", "2"}}, {{"b", "2"}, {"a", "1"}}}), "");
  EXPECT_EQ(found({{{"a", ""}, {"b", "2"}}, {{"b", "2"}, {"c", ""}}}), "");
  EXPECT_EQ(found({{}, {}}), "");
}

TEST(Agreement, ValuesAndRanksAreNamed) {
  const Statements usual{{"lr", "0.0003"}}, other{{"lr", "0.001"}};
  expect_lines(found({usual, other}), {"lr is 0.0003 on rank 0 and 0.001 on rank 1"});
  expect_lines(found({usual, other, usual, usual, usual}),
               {"lr is 0.0003 on ranks 0, 2–4 and 0.001 on rank 1"});
  expect_lines(found({other, usual, usual, other}), {"lr is 0.001 on ranks 0, 3 and 0.0003 on ranks 1, 2"});
  expect_lines(found({usual, other, {{"lr", "1"}}, usual}),
               {"lr is 0.0003 on ranks 0, 3, 0.001 on rank 1 and 1 on rank 2"});
}

TEST(Agreement, AKeyThatOneRankLacksIsADifference) {
  expect_lines(found({{{"a", "1"}, {"b", "2"}}, {{"a", "1"}}}), {"b is 2 on rank 0 and absent on rank 1"});
  expect_lines(found({{{"a", "1"}}, {{"a", "1"}}, {{"new", "3"}, {"a", "1"}}}),
               {"new is absent on ranks 0, 1 and 3 on rank 2"});
  expect_lines(found({{}, {{"a", "1"}}}), {"a is absent on rank 0 and 1 on rank 1"});
}

TEST(Agreement, DifferencesComeInTheOrderOfRankZero) {
  expect_lines(found({{{"z", "1"}, {"b", "2"}, {"a", "3"}},
                      {{"a", "4"}, {"b", "2"}, {"z", "1"}},
                      {{"y", "5"}, {"x", "6"}, {"a", "3"}, {"b", "2"}, {"z", "0"}}}),
               {"z is 1 on ranks 0, 1 and 0 on rank 2", "a is 3 on ranks 0, 2 and 4 on rank 1",
                "x is absent on ranks 0, 1 and 6 on rank 2", "y is absent on ranks 0, 1 and 5 on rank 2"});
}

// Ranks tell their first differences only; that must not make them look like rank 0 in the others.
TEST(Agreement, WhatIsToldIsRightWhereMuchDiffers) {
  Statements first, second, third;
  for (int i = 0; i < 100; ++i) {
    const std::string key = "key " + std::to_string(i);
    first.push_back({key, "1"});
    second.push_back({key, "2"});
    third.push_back({key, i < 90 ? "1" : "2"});
  }
  std::vector<std::string> lines;
  for (size_t i = 0; i < kMostDifferences; ++i)
    lines.push_back("key " + std::to_string(i) + " is 1 on ranks 0, 2 and 2 on rank 1");
  lines.push_back("and there are other differences");
  expect_lines(found({first, second, third}), lines);
  lines.clear();
  for (int i = 90; i < 100; ++i)
    lines.push_back("key " + std::to_string(i) + " is 1 on rank 0 and 2 on rank 1");
  expect_lines(found({first, third}), lines);
}

TEST(Agreement, ManyValuesAndLongOnesAreCut) {
  std::vector<Statements> ranks;
  for (int rank = 0; rank < 1000; ++rank) ranks.push_back({{"seed", std::to_string(rank)}});
  expect_lines(found(ranks),
               {"seed is 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3 and others on ranks 4–999"});

  const std::string text =
      found({{{"list", std::string(100'000, 'x') + "1"}}, {{"list", std::string(1000, 'x') + "2"}}});
  EXPECT_LT(text.size(), 3 * kLongestValue);
  EXPECT_NE(text.find("x1 on rank 0 and x"), std::string::npos) << text;
  EXPECT_NE(text.find("x2 on rank 1"), std::string::npos) << text;
}

TEST(Agreement, OneProcessAgreesWithItself) {
  const auto job = make_single_process();
  const Statements statements{{"a", "1"}, {"b", ""}};
  EXPECT_NO_THROW(agree(*job, statements));
}

}  // namespace
}  // namespace minillm::comm
