#include "kernels/embedding.h"

#include <algorithm>
#include <set>

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

constexpr int64_t kCounts[] = {0, 1, 7, 199, kThreadSanitized ? 2049 : 8191};

std::vector<int32_t> random_tokens(int64_t count, int64_t vocabulary, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(generator() % vocabulary);
  return tokens;
}

/// `before`: what the table's gradient holds, to be accumulated to; empty: poison, to be replaced.
std::vector<float> backward(DType type, int64_t vocabulary, int columns,
                            const std::vector<int32_t>& token_values, const std::vector<float>& dout_values,
                            int64_t offset = 0, int64_t table_offset = 0,
                            const std::vector<float>& before = {}) {
  const int64_t count = std::ssize(token_values);
  const Tensor dout(type, dout_values, offset);
  Tensor dtable(DType::kFp32, vocabulary * columns, table_offset);
  if (!before.empty()) dtable.set(before);
  const DeviceArray<int32_t> tokens(token_values);
  const DeviceBytes scratch(embedding_backward_scratch(count, vocabulary, columns));
  embedding_backward({.dtable = dtable.as<float>(),
                      .dout = dout.data(),
                      .tokens = tokens.get(),
                      .scratch = scratch.data(),
                      .count = count,
                      .vocabulary = vocabulary,
                      .columns = columns,
                      .dtype = type,
                      .accumulate = !before.empty()},
                     nullptr);
  return dtable.values();
}

/// The contract to the bit: rows of each token added in fp32 in the order of their positions; of a token with
/// 128 or more, each 64 to a sum of their own first, and what is left after all of these.
std::vector<float> ordered_sum(int64_t vocabulary, int columns, const std::vector<int32_t>& tokens,
                               const std::vector<float>& dout) {
  constexpr int64_t kPiece = 64, kFrequent = 128;
  std::vector<std::vector<int64_t>> positions(vocabulary);
  for (int64_t i = 0; i < std::ssize(tokens); ++i) positions[tokens[i]].push_back(i);
  std::vector<float> table(vocabulary * columns);
  for (int64_t token = 0; token < vocabulary; ++token) {
    const std::vector<int64_t>& of_token = positions[token];
    const int64_t count = std::ssize(of_token), pieces = count < kFrequent ? 0 : count / kPiece;
    for (int c = 0; c < columns; ++c) {
      float total = 0;
      for (int64_t piece = 0; piece < pieces; ++piece) {
        float sum = 0;
        for (int64_t i = 0; i < kPiece; ++i) sum += dout[of_token[piece * kPiece + i] * columns + c];
        total += sum;
      }
      for (int64_t i = pieces * kPiece; i < count; ++i) total += dout[of_token[i] * columns + c];
      table[token * columns + c] = total;
    }
  }
  return table;
}

void expect_backward(DType type, int64_t vocabulary, int columns, const std::vector<int32_t>& tokens,
                     int64_t offset = 0, int64_t table_offset = 0) {
  SCOPED_TRACE(std::to_string(tokens.size()) + " tokens of " + std::to_string(vocabulary) + ", columns " +
               std::to_string(columns));
  const std::vector<float> dout = rounded(normal_values(std::ssize(tokens) * columns, 1), type);
  expect_same_bits("dtable", backward(type, vocabulary, columns, tokens, dout, offset, table_offset),
                   ordered_sum(vocabulary, columns, tokens, dout));
}

class EmbeddingType : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, EmbeddingType, ::testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(EmbeddingType, ForwardCopiesRows) {
  constexpr int kVocabulary = 50;
  for (const int columns : {1, 7, 8, 24, 1025, 4096})
    for (const int64_t count : {0, 1, 7, 199})
      for (const int64_t offset : {0, 1, 2}) {
        if (count * columns > 300'000) continue;  // more of the same
        const std::vector<float> rows = rounded(normal_values(kVocabulary * columns, 2), GetParam());
        const std::vector<int32_t> ids = random_tokens(count, kVocabulary, 3);
        const Tensor table(GetParam(), rows, offset), out(GetParam(), count * columns, offset);
        const DeviceArray<int32_t> tokens(ids);
        embedding_forward({.out = out.data(),
                           .table = table.data(),
                           .tokens = tokens.get(),
                           .count = count,
                           .columns = columns,
                           .dtype = GetParam()},
                          nullptr);
        std::vector<float> expected;
        for (const int32_t id : ids)
          expected.insert(expected.end(), &rows[id * columns], &rows[id * columns] + columns);
        expect_same_bits("out", out.values(), expected);
      }
}

TEST_P(EmbeddingType, BackwardAddsInTheOrderOfPositions) {
  for (const int64_t count : kCounts)
    for (const int columns : {1, 12}) expect_backward(GetParam(), 300, columns, random_tokens(count, 300, 4));
}

TEST_P(EmbeddingType, Trap05_BackwardOfWideAndMisalignedRows) {
  for (const int columns : {7, 129, 258, 520, 1028})
    for (const int64_t offset : {0, 1, 2, 4})
      for (const int64_t table_offset : {0, 1, 2})
        expect_backward(GetParam(), 20, columns, random_tokens(50, 20, 5), offset, table_offset);
}

// One addition of each token's finished sum; rows of absent tokens keep what they hold, NaN included. A row
// that is summed on from what the table holds has other bits.
TEST_P(EmbeddingType, Accumulates) {
  constexpr int64_t kVocabulary = 40;
  std::vector<int32_t> tokens = random_tokens(300, kVocabulary / 2, 15);
  std::fill_n(tokens.begin() + 50, 140, 7);  // a frequent one
  for (const int columns : {1, 8, 130, 1028})
    for (const int64_t offset : {0, 1}) {
      const std::vector<float> dout = rounded(normal_values(std::ssize(tokens) * columns, 16), GetParam());
      std::vector<float> before = normal_values(kVocabulary * columns, 17, 10);
      before.back() = NAN;
      std::vector<float> expected = before, started = before;
      const std::vector<float> sums = ordered_sum(kVocabulary, columns, tokens, dout);
      for (const int32_t token : std::set<int32_t>(tokens.begin(), tokens.end()))
        for (int64_t i = token * columns; i < (token + 1) * columns; ++i) expected[i] = before[i] + sums[i];
      expect_same_bits("dtable",
                       backward(GetParam(), kVocabulary, columns, tokens, dout, offset, offset, before),
                       expected);
      for (size_t i = 0; i < dout.size(); ++i)
        started[tokens[i / columns] * columns + i % columns] += dout[i];
      started.back() = expected.back() = 0;
      EXPECT_NE(started, expected) << "planted: the values of this test cannot tell";
    }
}

// -0 in the row of an absent token is left alone, too: nothing is added to it. No token at all is no
// exception.
TEST(Embedding, AccumulatingNothingChangesNothing) {
  const std::vector<float> before(5 * 8, -0.0f);
  expect_same_bits("dtable", backward(DType::kFp32, 5, 8, {}, {}, 0, 0, before), before);
}

// Numbers of digits from one to eight, even and odd, ids that differ in one digit only, and a vocabulary of
// one.
TEST(Embedding, BackwardOfEveryVocabulary) {
  for (const int64_t vocabulary : {1, 2, 16, 17, 256, 257, 4096, 32000, 70'000})
    expect_backward(DType::kFp32, vocabulary, 3, random_tokens(500, vocabulary, 6));
  for (const int32_t step : {1, 16, 256, 4096}) {
    std::vector<int32_t> tokens(160);
    for (int i = 0; i < 160; ++i) tokens[i] = (i * 7 % 16) * step;
    expect_backward(DType::kFp32, 65'536, 2, tokens);
  }
}

TEST(Embedding, AllTokensDistinct) {
  std::vector<int32_t> tokens(1000);
  for (int i = 0; i < 1000; ++i) tokens[i] = 999 - i;
  expect_backward(DType::kBf16, 1000, 8, tokens);
}

// Runs of a token that end on, before and after the borders of pieces and of windows of the sorted positions,
// side by side with other tokens' runs.
TEST(Embedding, Trap11_RunsAroundThePieces) {
  using List = std::vector<int>;
  const List leads = kSanitized ? List{1, 64} : List{0, 1, 63, 64, 65};
  const List runs =
      kSanitized ? List{127, 128, 193} : List{63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 300};
  const List nexts = kSanitized ? List{1, 128} : List{1, 127, 128, 200};
  for (const int lead : leads)
    for (const int run : runs)
      for (const int next : nexts) {
        std::vector<int32_t> tokens(lead, 0);
        tokens.insert(tokens.end(), run, 1);
        tokens.insert(tokens.end(), next, 3);
        std::ranges::shuffle(tokens, std::mt19937(9));
        expect_backward(DType::kFp32, 5, 2, tokens);
      }
}

// As in text: few tokens make most of the occurrences.
TEST(Embedding, BackwardOfSkewedTokens) {
  std::mt19937 generator(10);
  std::vector<int32_t> tokens(6000);
  for (int32_t& token : tokens) token = static_cast<int32_t>(1000 / (1 + generator() % 999));
  for (const DType type : kAllTypes)
    for (const int columns : {5, 8}) expect_backward(type, 1001, columns, tokens);
}

// A sum in bf16 stops growing at 256, and one in fp32 of values of 0.1 is wrong in its fourth digit by then.
// Pieces keep it exact to a few units, and one token is work for many blocks.
TEST(Embedding, Trap14_OneTokenAHundredThousandTimes) {
  constexpr int64_t kCount = kSanitized ? 10'000 : 100'000;
  constexpr int kColumns = 9;
  const std::vector<int32_t> tokens(kCount, 3);
  const std::vector<float> ones(kCount * kColumns, 1.0f);
  const std::vector<float> result = backward(DType::kBf16, 5, kColumns, tokens, ones);
  for (int64_t i = 0; i < std::ssize(result); ++i) EXPECT_EQ(result[i], i / kColumns == 3 ? kCount : 0) << i;

  const float tenth = rounded(0.1f, DType::kBf16);
  const std::vector<float> tenths(kCount * kColumns, tenth);
  float running = 0;
  for (int64_t i = 0; i < kCount; ++i) running += tenth;
  const double exact = static_cast<double>(tenth) * kCount;
  const double error = std::abs(backward(DType::kBf16, 5, kColumns, tokens, tenths)[3 * kColumns] - exact);
  EXPECT_LT(error / exact, 2e-5);
  // The sum of the shorter run is nearly exact either way.
  if (kCount == 100'000) {
    EXPECT_GT(std::abs(running - exact), 4 * error) << "a single sum would do: the test shows nothing";
  }
}

// More positions than the blocks of the sort take in one tile each; the last tile is not full.
TEST(Embedding, BackwardOfMoreTokensThanTiles) {
  if (kSanitized) GTEST_SKIP() << "the same accesses, more often";
  expect_backward(DType::kFp32, 70'000, 1, random_tokens(256 * 2048 + 777, 70'000, 14));
}

// Every partial sum, count and sorted position is written before it is read: scratch holds other NaN patterns
// and other integers than the 0xFF that tests start with.
TEST(Embedding, Trap10_DirtyScratch) {
  const std::vector<int32_t> token_values = random_tokens(700, 3, 11);
  const std::vector<float> values = normal_values(700 * 4, 12);
  const Tensor dout(DType::kFp32, values);
  const DeviceArray<int32_t> tokens(token_values);
  const DeviceBytes scratch(embedding_backward_scratch(700, 300, 4));
  for (const int byte : {0x00, 0x7f, 0xa5}) {
    const Tensor dtable(DType::kFp32, 300 * 4);
    check(cudaMemset(scratch.data(), byte, scratch.bytes()));
    embedding_backward({.dtable = dtable.as<float>(),
                        .dout = dout.data(),
                        .tokens = tokens.get(),
                        .scratch = scratch.data(),
                        .count = 700,
                        .vocabulary = 300,
                        .columns = 4,
                        .dtype = DType::kFp32},
                       nullptr);
    expect_same_bits("dtable", dtable.values(), ordered_sum(300, 4, token_values, values));
  }
}

// Rows far into a table and a gradient of more than 2^31 elements, of which only the end exists: addresses
// are computed in 64 bits or lie elsewhere.
TEST(Embedding, Trap01_RowsBeyond32Bits) {
  constexpr int kColumns = 8192, kToken = 300'000;
  constexpr int64_t kBefore = int64_t{kToken} * kColumns;
  static_assert(kBefore > int64_t{1} << 31);
  const std::vector<float> row = normal_values(kColumns, 13);
  const Tensor last_row(DType::kBf16, row), out(DType::kBf16, 2 * kColumns);
  const DeviceArray<int32_t> tokens(std::vector<int32_t>{kToken, kToken});
  const uintptr_t table = reinterpret_cast<uintptr_t>(last_row.data()) - kBefore * 2;
  embedding_forward({.out = out.data(),
                     .table = reinterpret_cast<const void*>(table),
                     .tokens = tokens.get(),
                     .count = 2,
                     .columns = kColumns,
                     .dtype = DType::kBf16},
                    nullptr);
  std::vector<float> expected = rounded(row, DType::kBf16);
  expected.insert(expected.end(), expected.begin(), expected.end());
  expect_same_bits("out", out.values(), expected);
}

TEST(Embedding, ScratchAndSortOfLargeBatches) {
  const int64_t million = int64_t{1} << 20;
  // Occurrences twice, starts and counts; a 64th of the rows in fp32.
  const int64_t without_partials = embedding_backward_scratch(million, 152'064, 0);
  EXPECT_LT(without_partials, million * 16 + 152'064 * 4 + (int64_t{1} << 20));
  EXPECT_EQ(embedding_backward_scratch(million, 152'064, 2048) - without_partials, million / 64 * 2048 * 4);
}

TEST(Embedding, Repeatable) {
  std::vector<int32_t> tokens = random_tokens(2500, 100, 7);
  std::fill_n(tokens.begin() + 100, 400, 42);
  const std::vector<float> dout = normal_values(2500 * 8, 8);
  expect_repeatable("dtable", [&] { return backward(DType::kBf16, 100, 8, tokens, dout); });
}

TEST(Embedding, Cost) {
  EXPECT_EQ(embedding_forward_cost(10, 8, DType::kBf16).bytes, 10 * (8 * 2 * 2 + 4));
  EXPECT_EQ(embedding_backward_cost(10, 100, 8, DType::kBf16).bytes, 10 * (8 * 2 + 4) + 100 * 8 * 4);
  EXPECT_EQ(embedding_backward_cost(10, 100, 8, DType::kBf16).flops, 80);
  // Rows of the tokens that occur are read and written: as many as there are tokens, but not more than exist.
  EXPECT_EQ(embedding_backward_cost(10, 100, 8, DType::kBf16, true).bytes, 10 * (8 * 2 + 4) + 2 * 10 * 8 * 4);
  EXPECT_EQ(embedding_backward_cost(10, 4, 8, DType::kBf16, true).bytes, 10 * (8 * 2 + 4) + 2 * 4 * 8 * 4);
  EXPECT_EQ(embedding_backward_cost(10, 4, 8, DType::kBf16, true).flops, 80 + 32);
  const Cost large = embedding_backward_cost(int64_t{1} << 20, 32'000, 2048, DType::kBf16);
  EXPECT_LT(large.extra_bytes, large.bytes / 10);
}

}  // namespace
}  // namespace minillm::kernels::testing
