#include "kernels/rope.h"

#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

struct Shape {
  int64_t batch;
  int sequence, heads, head_size;
  int kv_heads = 0;  ///< 0: as many as heads
  int rotated() const { return heads + (kv_heads == 0 ? heads : kv_heads); }
  int all_heads() const { return heads + 2 * (kv_heads == 0 ? heads : kv_heads); }
  int64_t elements() const { return batch * sequence * all_heads() * head_size; }
};

// Half heads of 16, 8, 4, 1 and 64 elements: full vectors, words, single elements; positions that share a
// block and positions of more than one; as many heads of k as of q, fewer, one; groups of heads that are not
// full.
constexpr Shape kShapes[] = {{0, 4, 2, 8},     {1, 1, 1, 2},     {2, 7, 3, 32},      {2, 5, 1, 16},
                             {1, 33, 5, 8},    {3, 3, 2, 6},     {1, 3, 40, 128},    {1, 2, 33, 66},
                             {2, 9, 8, 32, 2}, {3, 5, 7, 20, 1}, {2, 3, 32, 128, 8}, {1, 199, 6, 8, 3},
                             {2, 3, 5, 16, 5}};
constexpr double kTheta = 10000;

/// The rotation in the precision `Real`, from the angles' (cos, sin) in that precision.
template <class Real>
std::vector<Real> rope_loop(const Shape& s, const std::vector<float>& qkv, bool inverse) {
  std::vector<Real> result(qkv.begin(), qkv.end());
  const int half = s.head_size / 2;
  for (int64_t token = 0; token < s.batch * s.sequence; ++token)
    for (int head = 0; head < s.rotated(); ++head)  // of q, then of k
      for (int i = 0; i < half; ++i) {
        const double angle = (token % s.sequence) * std::pow(kTheta, -2.0 * i / s.head_size);
        const Real cosine = std::cos(angle), sine = inverse ? -std::sin(angle) : std::sin(angle);
        const int64_t at = (token * s.all_heads() + head) * s.head_size + i;
        const Real x = qkv[at], y = qkv[at + half];
        result[at] = x * cosine - y * sine;
        result[at + half] = y * cosine + x * sine;
      }
  return result;
}

/// The length of the pair that an element belongs to: what rounding errors are relative to.
std::vector<double> pair_lengths(const Shape& s, const std::vector<float>& qkv) {
  std::vector<double> result;
  const int half = s.head_size / 2;
  for (int64_t i = 0; i < s.elements(); ++i) {
    const int64_t partner = i % s.head_size < half ? i + half : i - half;
    result.push_back(std::hypot(qkv[i], qkv[partner]));
  }
  return result;
}

void run(const Tensor& qkv, const Shape& s, bool inverse) {
  const DeviceArray<float2> table(rope_table(s.sequence, s.head_size, kTheta));
  rope({.qkv = qkv.data(),
        .table = table.get(),
        .batch = s.batch,
        .sequence = s.sequence,
        .heads = s.heads,
        .head_size = s.head_size,
        .inverse = inverse,
        .dtype = qkv.type(),
        .kv_heads = s.kv_heads},
       nullptr);
  check(cudaDeviceSynchronize());
}

TEST(Rope, MatchesFloat64) {
  for (const DType type : kAllTypes)
    for (const Shape& s : kShapes)
      for (const int64_t offset : {0, 1, 2})
        for (const bool inverse : {false, true}) {
          const std::vector<float> values = rounded(normal_values(s.elements(), 1), type);
          const Tensor qkv(type, values, offset);
          run(qkv, s, inverse);
          expect_close("qkv", qkv.values(), rope_loop<double>(s, values, inverse),
                       rope_loop<float>(s, values, inverse), type, pair_lengths(s, values));
          expect_rounded_once("qkv", qkv.values(), rope_loop<double>(s, values, inverse), type);
        }
}

TEST(Rope, LeavesVAlone) {
  for (const Shape& s : {Shape{2, 5, 3, 32}, Shape{2, 5, 6, 32, 2}}) {
    const std::vector<float> values = normal_values(s.elements(), 2);
    const Tensor qkv(DType::kFp32, values);
    run(qkv, s, false);
    const std::vector<float> result = qkv.values();
    int64_t changed = 0;
    for (int64_t i = 0; i < s.elements(); ++i) {
      const bool is_v = i / s.head_size % s.all_heads() >= s.rotated();
      if (is_v) {
        EXPECT_EQ(result[i], values[i]) << "element " << i;
      }
      changed += result[i] != values[i];
    }
    // All of q and k but those of the first position of each sequence.
    EXPECT_EQ(changed, s.batch * (s.sequence - 1) * s.rotated() * s.head_size);
  }
}

TEST(Rope, AsManyHeadsOfKAsOfQIsTheDefault) {
  const Shape implied = {2, 5, 3, 32}, stated = {2, 5, 3, 32, 3};
  const std::vector<float> values = normal_values(implied.elements(), 5);
  const Tensor a(DType::kBf16, values), b(DType::kBf16, values);
  run(a, implied, false);
  run(b, stated, false);
  expect_same_bits("qkv", a.read(), b.read());
}

TEST(Rope, InverseUndoes) {
  const Shape s = {1, 33, 2, 64};
  const std::vector<float> values = normal_values(s.elements(), 3);
  const Tensor qkv(DType::kFp32, values);
  run(qkv, s, false);
  run(qkv, s, true);
  const std::vector<double> reference(values.begin(), values.end());
  // Two rotations, each three roundings of the pair and of cos and sin.
  EXPECT_LE(largest_error(qkv.values(), reference, DType::kFp32, pair_lengths(s, values)).units, 4);
}

TEST(Rope, Trap16_TableIsExactAtLongPositions) {
  constexpr int kSequence = 131072, kHeadSize = 8;
  const std::vector<float2> table = rope_table(kSequence, kHeadSize, 500000);
  ASSERT_EQ(std::ssize(table), int64_t{kSequence} * kHeadSize / 2);
  for (int i = 0; i < kHeadSize / 2; ++i) {
    const int position = kSequence - 1;
    const long double angle = position * std::pow(500000.0L, -2.0L * i / kHeadSize);
    const float2 entry = table[int64_t{position} * kHeadSize / 2 + i];
    EXPECT_NEAR(entry.x, std::cos(angle), 1e-7);
    EXPECT_NEAR(entry.y, std::sin(angle), 1e-7);
  }
}

// The angle itself in fp32, as a kernel that computes it would have it: the fault that a table from double
// avoids must be larger than what the test above tolerates.
TEST(Rope, Trap16_AnglesInFp32AreWrong) {
  double largest = 0;
  for (int i = 0; i < 64; ++i) {
    const double exact = 131071 * std::pow(500000.0, -2.0 * i / 128);
    const float angle = 131071.0f * std::pow(500000.0f, static_cast<float>(-2.0 * i / 128));
    largest = std::max(largest, std::abs(std::cos(exact) - std::cos(static_cast<double>(angle))));
  }
  EXPECT_GT(largest, 1e-4);
}

// One sequence whose last position is 131071: that position's row of the table is used, for q and for k.
TEST(Rope, Trap16_LastOfALongSequence) {
  const Shape s = {1, kThreadSanitized ? 8192 : 131072, 1, 4};
  const std::vector<float> values = normal_values(s.elements(), 6);
  for (const bool inverse : {false, true}) {
    const Tensor qkv(DType::kFp32, values);
    run(qkv, s, inverse);
    const std::vector<double> reference = rope_loop<double>(s, values, inverse);
    const std::vector<float> plain = rope_loop<float>(s, values, inverse);
    const std::vector<double> lengths = pair_lengths(s, values);
    expect_close(inverse ? "inverse" : "forward", qkv.values(), reference, plain, DType::kFp32, lengths);
  }
}

// Turning the wrong way in the backward pass leaves lengths right: the two directions must differ, and each
// must be its own reference's.
TEST(Rope, Trap16_BackwardTurnsTheOtherWay) {
  const Shape s = {1, 9, 2, 16};
  const std::vector<float> values = normal_values(s.elements(), 7);
  const Tensor qkv(DType::kFp32, values);
  run(qkv, s, true);
  const std::vector<double> wrong = rope_loop<double>(s, values, false);
  EXPECT_GT(largest_error(qkv.values(), wrong, DType::kFp32, pair_lengths(s, values)).units, 1e5);
}

TEST(Rope, Trap05_MisalignedViews) {
  const Shape s = {2, 5, 4, 32, 2};
  for (const DType type : kAllTypes) {
    const std::vector<float> values = normal_values(s.elements(), 8);
    const Tensor aligned(type, values);
    run(aligned, s, false);
    for (const int64_t offset : {1, 2, 3, 4}) {
      const Tensor view(type, values, offset);
      run(view, s, false);
      expect_same_bits("qkv", aligned.read(), view.read());
    }
  }
}

TEST(Rope, Repeatable) {
  const Shape s = {2, 7, 3, 32};
  const std::vector<float> values = normal_values(s.elements(), 4);
  expect_repeatable("rope", [&] {
    const Tensor qkv(DType::kBf16, values);
    run(qkv, s, false);
    return qkv.read();
  });
}

TEST(Rope, Cost) {
  const int64_t elements = int64_t{1} << 33;  // of q and k
  const Cost cost = rope_cost(1 << 12, 1 << 12, 16, 16, DType::kBf16);
  EXPECT_EQ(cost.flops, 3 * elements);
  EXPECT_EQ(cost.bytes, 4 * elements + (1 << 12) * 16 * 4);
  const Cost grouped = rope_cost(1 << 12, 1 << 12, 16, 16, DType::kBf16, 4);
  EXPECT_EQ(grouped.flops, 3 * elements / 32 * 20);
}

}  // namespace
}  // namespace minillm::kernels::testing
