#include "kernels/embedding.h"

#include <map>
#include <numeric>

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

constexpr int64_t kCounts[] = {0, 1, 7, 199, 8191};

std::vector<int32_t> random_tokens(int64_t count, int64_t vocabulary, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(generator() % vocabulary);
  return tokens;
}

std::vector<float> backward(DType type, int64_t vocabulary, int columns,
                            const std::vector<int32_t>& token_values, const std::vector<float>& dout_values,
                            int64_t offset = 0) {
  const int64_t count = std::ssize(token_values);
  const Tensor dout(type, dout_values, offset), dtable(DType::kFp32, vocabulary * columns, offset);
  const DeviceArray<int32_t> tokens(token_values);
  const DeviceBytes scratch(embedding_backward_scratch(count, vocabulary));
  embedding_backward({.dtable = dtable.as<float>(),
                      .dout = dout.data(),
                      .tokens = tokens.get(),
                      .scratch = scratch.data(),
                      .count = count,
                      .vocabulary = vocabulary,
                      .columns = columns,
                      .dtype = type},
                     nullptr);
  return dtable.values();
}

/// The contract to the bit: rows of each token added in fp32 in the order of their positions.
std::vector<float> ordered_sum(int64_t vocabulary, int columns, const std::vector<int32_t>& tokens,
                               const std::vector<float>& dout) {
  std::vector<float> table(vocabulary * columns);
  for (int64_t i = 0; i < std::ssize(tokens); ++i)
    for (int c = 0; c < columns; ++c) table[tokens[i] * columns + c] += dout[i * columns + c];
  return table;
}

void expect_backward(DType type, int64_t vocabulary, int columns, const std::vector<int32_t>& tokens,
                     int64_t offset = 0) {
  SCOPED_TRACE(std::to_string(tokens.size()) + " tokens of " + std::to_string(vocabulary) + ", columns " +
               std::to_string(columns));
  const std::vector<float> dout = rounded(normal_values(std::ssize(tokens) * columns, 1), type);
  expect_same_bits("dtable", backward(type, vocabulary, columns, tokens, dout, offset),
                   ordered_sum(vocabulary, columns, tokens, dout));
}

class EmbeddingType : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, EmbeddingType, ::testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(EmbeddingType, ForwardCopiesRows) {
  constexpr int kVocabulary = 50;
  for (const int columns : {1, 7, 8, 24, 1025})
    for (const int64_t count : {0, 1, 7, 199})
      for (const int64_t offset : {0, 1}) {
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

TEST_P(EmbeddingType, BackwardOfWideAndMisalignedRows) {
  for (const int columns : {7, 129, 256, 520})
    for (const int64_t offset : {0, 1})
      expect_backward(GetParam(), 40, columns, random_tokens(100, 40, 5), offset);
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

// A sum in bf16 stops growing at 256.
TEST(Embedding, OneTokenTenThousandTimes) {
  constexpr int64_t kCount = 10'000;
  const std::vector<float> result =
      backward(DType::kBf16, 5, 9, std::vector<int32_t>(kCount, 3), std::vector<float>(kCount * 9, 1.0f));
  for (int64_t i = 0; i < 5 * 9; ++i) EXPECT_EQ(result[i], i / 9 == 3 ? kCount : 0) << i;
}

TEST(Embedding, Repeatable) {
  const std::vector<int32_t> tokens = random_tokens(3000, 100, 7);
  const std::vector<float> dout = normal_values(3000 * 16, 8);
  expect_repeatable("dtable", [&] { return backward(DType::kBf16, 100, 16, tokens, dout); });
}

TEST(Embedding, Cost) {
  EXPECT_EQ(embedding_forward_cost(10, 8, DType::kBf16).bytes, 10 * (8 * 2 * 2 + 4));
  EXPECT_EQ(embedding_backward_cost(10, 100, 8, DType::kBf16).bytes, 10 * (8 * 2 + 4) + 100 * 8 * 4);
  EXPECT_EQ(embedding_backward_cost(10, 100, 8, DType::kBf16).flops, 80);
}

}  // namespace
}  // namespace minillm::kernels::testing
