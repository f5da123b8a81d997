#include "kernels/attention.h"

#include "core/error.h"
#include "kernels/device/attention_layout.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

struct Values {
  std::vector<float> qkv, dout;
};

template <class Real>
struct Results {
  std::vector<Real> out, lse, dqkv;
};

int64_t rows_of(const AttentionShape& s) {
  return s.batch * s.sequence * s.heads;
}
int kv_heads_of(const AttentionShape& s) {
  return s.kv_heads == 0 ? s.heads : s.kv_heads;
}
/// Elements of q, k and v of one position.
int64_t width_of(const AttentionShape& s) {
  return int64_t{s.heads + 2 * kv_heads_of(s)} * s.head_size;
}
/// 0, 1, 2 for an element of q, k, v of a packed tensor.
int part_of(const AttentionShape& s, int64_t i) {
  const int64_t head = i % width_of(s) / s.head_size;
  return head < s.heads ? 0 : head < s.heads + kv_heads_of(s) ? 1 : 2;
}

Values random_values(const AttentionShape& s, uint32_t seed, float query_scale = 1) {
  Values v{normal_values(s.batch * s.sequence * width_of(s), seed),
           normal_values(rows_of(s) * s.head_size, seed + 1)};
  for (int64_t i = 0; i < std::ssize(v.qkv); ++i)
    if (part_of(s, i) == 0) v.qkv[i] *= query_scale;
  return {rounded(v.qkv, s.dtype), rounded(v.dout, s.dtype)};
}

/// Forward and backward pass as plain loops in `Real`. With Real = float this is what an implementation can
/// reach that rounds once what it must: `out` to the tensors' type, and for bf16 the probabilities and score
/// gradients that tensor cores take as operands. Its distance from Real = double is the yardstick. `bound`
/// receives the sum of the absolute values of all terms of each gradient, before differences cancel.
template <class Real>
Results<Real> attention_loop(const AttentionShape& s, const Values& v, std::vector<double>* bound = nullptr) {
  const int64_t d = s.head_size, width = s.heads * d;
  Results<Real> r{std::vector<Real>(v.dout.size()), std::vector<Real>(rows_of(s)),
                  std::vector<Real>(v.qkv.size())};
  if (bound != nullptr) bound->assign(v.qkv.size(), 0);
  const auto stored = [&](Real x) {
    if constexpr (std::is_same_v<Real, float>) return rounded(x, s.dtype);
    return x;
  };
  std::vector<Real> p(s.sequence);
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t t = 0; t < s.sequence; ++t) {
        const int64_t kv_head = h / (s.heads / kv_heads_of(s));
        const auto at = [&](int64_t position, int part) {
          const int64_t head = part == 0 ? h : s.heads + (part - 1) * kv_heads_of(s) + kv_head;
          return (b * s.sequence + position) * width_of(s) + head * d;
        };
        const auto dot = [&](const float* x, const float* y) {
          Real sum = 0;
          for (int64_t i = 0; i < d; ++i) sum += static_cast<Real>(x[i]) * static_cast<Real>(y[i]);
          return sum;
        };
        const int64_t keys = s.causal ? t + 1 : s.sequence, row = (b * s.sequence + t) * width + h * d;
        Real maximum = -std::numeric_limits<Real>::infinity(), sum = 0, delta = 0;
        double bound_of_delta = 0;
        for (int64_t k = 0; k < keys; ++k) {
          p[k] = dot(&v.qkv[at(t, 0)], &v.qkv[at(k, 1)]) * static_cast<Real>(s.scale);
          maximum = std::max(maximum, p[k]);
        }
        if (maximum == -std::numeric_limits<Real>::infinity()) {
          r.lse[(b * s.heads + h) * s.sequence + t] = std::numeric_limits<Real>::infinity();
          continue;
        }
        for (int64_t k = 0; k < keys; ++k) sum += p[k] = std::exp(p[k] - maximum);
        for (int64_t k = 0; k < keys; ++k)
          for (int64_t i = 0; i < d; ++i) r.out[row + i] += stored(p[k]) * v.qkv[at(k, 2) + i];
        for (int64_t i = 0; i < d; ++i) r.out[row + i] /= sum;
        r.lse[(b * s.heads + h) * s.sequence + t] = maximum + std::log(sum);

        for (int64_t i = 0; i < d; ++i) {
          r.out[row + i] = stored(r.out[row + i]);
          delta += r.out[row + i] * v.dout[row + i];
          bound_of_delta += std::abs(static_cast<double>(r.out[row + i] * v.dout[row + i]));
        }
        for (int64_t k = 0; k < keys; ++k) {
          const Real probability = p[k] / sum;
          const Real ds = stored(probability * (dot(&v.dout[row], &v.qkv[at(k, 2)]) - delta));
          double bound_of_ds = bound_of_delta;
          for (int64_t i = 0; i < d; ++i)
            bound_of_ds += std::abs(static_cast<double>(v.dout[row + i] * v.qkv[at(k, 2) + i]));
          bound_of_ds *= static_cast<double>(probability) * s.scale;
          for (int64_t i = 0; i < d; ++i) {
            const Real scale = s.scale;
            r.dqkv[at(t, 0) + i] += ds * scale * v.qkv[at(k, 1) + i];
            r.dqkv[at(k, 1) + i] += ds * scale * v.qkv[at(t, 0) + i];
            r.dqkv[at(k, 2) + i] += stored(probability) * v.dout[row + i];
            if (bound == nullptr) continue;
            (*bound)[at(t, 0) + i] += bound_of_ds * std::abs(v.qkv[at(k, 1) + i]);
            (*bound)[at(k, 1) + i] += bound_of_ds * std::abs(v.qkv[at(t, 0) + i]);
            (*bound)[at(k, 2) + i] += static_cast<double>(probability) * std::abs(v.dout[row + i]);
          }
        }
      }
  return r;
}

/// Runs both passes on poisoned memory.
Results<float> run(const AttentionShape& s, const Values& v) {
  const Tensor qkv(s.dtype, v.qkv), dout(s.dtype, v.dout);
  const Tensor out(s.dtype, std::ssize(v.dout)), dqkv(s.dtype, std::ssize(v.qkv));
  const DeviceArray<float> lse(rows_of(s));
  const DeviceBytes scratch(attention_backward_scratch(s));
  attention_forward({.shape = s, .out = out.data(), .lse = lse.get(), .qkv = qkv.data()}, nullptr);
  attention_backward({.shape = s,
                      .dqkv = dqkv.data(),
                      .dout = dout.data(),
                      .qkv = qkv.data(),
                      .out = out.data(),
                      .lse = lse.get(),
                      .scratch = scratch.as<float>()},
                     nullptr);
  return {out.values(), lse.values(), dqkv.values()};
}

double distance(const std::vector<float>& a, const std::vector<double>& b) {
  double largest = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
  }
  return largest;
}

/// How far `actual` is from float64, in units of what is allowed: `factor` times the distance of the fp32
/// loop, the rule by which FlashAttention is tested, plus one unit in the last place of a typical element,
/// plus `slack`.
double relative_distance(const std::vector<float>& actual, const std::vector<double>& reference,
                         const std::vector<float>& plain, double factor, DType type, double slack = 0) {
  double squares = 0;
  for (const double x : reference) squares += x * x;
  const double unit = ulp(std::sqrt(squares / static_cast<double>(reference.size())), type);
  return distance(actual, reference) / (factor * distance(rounded(plain, type), reference) + unit + slack);
}

std::string describe(const AttentionShape& s) {
  return std::string(name_of(s.dtype)) + " batch " + std::to_string(s.batch) + " sequence " +
         std::to_string(s.sequence) + " heads " + std::to_string(s.heads) + " of queries, " +
         std::to_string(kv_heads_of(s)) + " of keys, head size " + std::to_string(s.head_size) +
         (s.causal ? " causal" : "");
}

AttentionShape shape_of(int64_t batch, int sequence, int heads, int head_size, bool causal, DType type,
                        int kv_heads = 0) {
  return {batch, sequence, heads, head_size, causal, 1 / std::sqrt(static_cast<float>(head_size)),
          type,  kv_heads};
}

void expect_matches_float64(const AttentionShape& s, float query_scale = 1) {
  SCOPED_TRACE(describe(s));
  const Values v = random_values(s, 17, query_scale);
  std::vector<double> bound;
  const Results<float> actual = run(s, v), plain = attention_loop<float>(s, v);
  const Results<double> reference = attention_loop<double>(s, v, &bound);
  EXPECT_LE(relative_distance(actual.out, reference.out, plain.out, 2, s.dtype), 1) << "out";
  EXPECT_LE(relative_distance(actual.lse, reference.lse, plain.lse, 2, DType::kFp32), 1) << "lse";
  // Rounding in fp32 before differences cancel, and of p = exp(score - lse): score and lse are each rounded
  // twice on the way to base 2.
  double largest_bound = 0, largest_lse = 1;
  for (const double lse : reference.lse) largest_lse = std::max(largest_lse, std::abs(lse));
  for (const double x : bound) largest_bound = std::max(largest_bound, x);
  const double slack = 4 * 0x1p-24 * largest_lse * largest_bound;
  for (int part = 0; part < 3; ++part) {
    const auto only = [&](const auto& packed) {
      auto result = packed;
      result.clear();
      for (int64_t i = 0; i < std::ssize(packed); ++i)
        if (part_of(s, i) == part) result.push_back(packed[i]);
      return result;
    };
    EXPECT_LE(relative_distance(only(actual.dqkv), only(reference.dqkv), only(plain.dqkv), 3, s.dtype, slack),
              1)
        << "gradient of "
        << "qkv"[part];
  }
}

class AttentionType : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(, AttentionType, ::testing::ValuesIn(kAllTypes),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// One row, less than a tile, a tile of the narrow and of the wide kernels, one row more, several ragged
// tiles; head sizes below, at and between the compiled ones.
TEST_P(AttentionType, MatchesFloat64) {
  const std::vector<int> head_sizes =
      kSanitized ? std::vector{24, 64, 128} : std::vector{8, 24, 32, 64, 96, 128};
  const std::vector<int> sequences = kSanitized ? std::vector{7, 100} : std::vector{1, 7, 33, 64, 100, 130};
  for (const int head_size : head_sizes)
    for (const int sequence : sequences)
      for (const bool causal : {false, true})
        expect_matches_float64(shape_of(1, sequence, 1, head_size, causal, GetParam()));
}

TEST_P(AttentionType, HeadsAndSequencesDoNotMix) {
  for (const bool causal : {false, true}) {
    expect_matches_float64(shape_of(2, 33, 3, 24, causal, GetParam()));
    expect_matches_float64(shape_of(2, 33, 3, 128, causal, GetParam()));
    expect_matches_float64(shape_of(2, 70, 1, 64, causal, GetParam()));
  }
}

// Scores of ±300 and more: exp overflows fp32 from 88 on.
TEST_P(AttentionType, LargeScores) {
  for (const bool causal : {false, true})
    expect_matches_float64(shape_of(1, 100, 1, 64, causal, GetParam()), 100);
}

TEST_P(AttentionType, GroupedQueries) {
  for (const bool causal : {false, true}) {
    expect_matches_float64(shape_of(2, 33, 6, 32, causal, GetParam(), 2));
    expect_matches_float64(shape_of(1, 70, 4, 64, causal, GetParam(), 1));
    expect_matches_float64(shape_of(1, 40, 4, 128, causal, GetParam(), 2));
  }
}

// Enough tiles that the grid fills the device: each warp then owns twice the queries, and a row's bits do not
// change.
TEST_P(AttentionType, BitsDoNotDependOnTheGrid) {
  for (const int head_size : {64, 128}) {
    const AttentionShape one = shape_of(1, 70, 1, head_size, true, GetParam());
    AttentionShape many = one;
    many.batch =
        kSanitized ? 16 : 20;  // as many blocks of 128 queries as the simulated device has processors
    const Values v = random_values(one, 3);
    Values repeated;
    for (int i = 0; i < many.batch; ++i) {
      repeated.qkv.insert(repeated.qkv.end(), v.qkv.begin(), v.qkv.end());
      repeated.dout.insert(repeated.dout.end(), v.dout.begin(), v.dout.end());
    }
    const Results<float> alone = run(one, v);
    Results<float> among = run(many, repeated);
    among.out.resize(alone.out.size());
    among.lse.resize(alone.lse.size());
    among.dqkv.resize(alone.dqkv.size());
    expect_same_bits("out", alone.out, among.out);
    expect_same_bits("lse", alone.lse, among.lse);
    expect_same_bits("dqkv", alone.dqkv, among.dqkv);
  }
}

TEST_P(AttentionType, Trap09_GradientsOfQueriesAreRepeatable) {
  const AttentionShape s = shape_of(1, 70, 2, 32, true, GetParam(), 1);
  const Values v = random_values(s, 4);
  expect_repeatable("out, lse and dqkv", [&] {
    Results<float> r = run(s, v);
    r.dqkv.insert(r.dqkv.end(), r.out.begin(), r.out.end());
    r.dqkv.insert(r.dqkv.end(), r.lse.begin(), r.lse.end());
    return r.dqkv;
  });
}

TEST(Attention, ToleranceNoticesAnErrorOfTwoPercentInTheScale) {
  for (const DType type : kAllTypes) {
    AttentionShape s = shape_of(1, 64, 1, 32, false, type);
    const Values v = random_values(s, 5, 3);
    const Results<double> reference = attention_loop<double>(s, v);
    const Results<float> plain = attention_loop<float>(s, v);
    s.scale *= 1.02f;
    const Results<float> wrong = run(s, v);
    EXPECT_GT(relative_distance(wrong.out, reference.out, plain.out, 2, type), 1);
    EXPECT_GT(relative_distance(wrong.dqkv, reference.dqkv, plain.dqkv, 3, type), 1);
  }
}

// Values in the same tile and in later ones, large enough to change every bit that they reach.
TEST_P(AttentionType, CausalMaskHidesTheFuture) {
  const AttentionShape s = shape_of(1, 130, 1, 32, true, GetParam());
  const int64_t width = 3 * s.head_size;
  Values v = random_values(s, 6);
  const Results<float> before = run(s, v);
  constexpr int64_t kChanged = 70;
  for (int64_t i = kChanged * width; i < std::ssize(v.qkv); ++i) v.qkv[i] = rounded(100 - v.qkv[i], s.dtype);
  const Results<float> after = run(s, v);
  const auto past = [&](std::vector<float> x, int64_t row) {
    x.resize(kChanged * row);
    return x;
  };
  expect_same_bits("out", past(before.out, s.head_size), past(after.out, s.head_size));
  expect_same_bits("lse", past(before.lse, 1), past(after.lse, 1));
  EXPECT_NE(before.out.back(), after.out.back());
}

TEST_P(AttentionType, NanPoisonsTheRowsThatSeeIt) {
  const AttentionShape s = shape_of(1, 130, 1, 32, true, GetParam());
  Values v = random_values(s, 7);
  constexpr int64_t kPoisoned = 100;
  v.qkv[kPoisoned * 3 * s.head_size + s.head_size + 5] = NAN;  // an element of k
  const Results<float> r = run(s, v);
  for (int64_t t = 0; t < s.sequence; ++t) {
    EXPECT_EQ(std::isnan(r.out[t * s.head_size]), t >= kPoisoned) << t;
    EXPECT_EQ(std::isnan(r.lse[t]), t >= kPoisoned) << t;
  }
  EXPECT_TRUE(std::isnan(r.dqkv[0 * s.head_size + kPoisoned * 3 * s.head_size])) << "dq of the row itself";
}

// Scores of -inf have probability 0, also where they fill a whole tile and the maximum so far is -inf. A row
// of nothing else has no output and gives no gradient.
TEST_P(AttentionType, Trap06_ScoresOfMinusInfinity) {
  const AttentionShape s = shape_of(1, 130, 1, 32, false, GetParam());
  const int64_t width = width_of(s);
  Values v = random_values(s, 8);
  for (int64_t t = 0; t < s.sequence; ++t) v.qkv[t * width] = 1;
  for (int64_t t = 66; t < s.sequence; ++t) v.qkv[t * width + s.head_size] = -INFINITY;
  const double tolerance = s.dtype == DType::kFp32 ? 1e-5 : 2e-2;
  {
    const Results<float> r = run(s, v);
    const Results<double> reference = attention_loop<double>(s, v);
    EXPECT_LT(distance(r.out, reference.out), tolerance);
    EXPECT_LT(distance(r.lse, reference.lse), 1e-5);
  }
  for (int64_t t = 0; t < s.sequence; ++t) v.qkv[t * width + s.head_size] = -INFINITY;
  const Results<float> r = run(s, v);
  for (const float x : r.out) EXPECT_EQ(x, 0);
  for (const float x : r.lse) EXPECT_EQ(x, INFINITY);
  for (int64_t i = 0; i < std::ssize(r.dqkv); ++i)
    if (part_of(s, i) != 0) {  // dq is 0 · k, and k is infinite
      EXPECT_EQ(r.dqkv[i], 0) << i;
    }
}

// One row, causal: the diagonal is all there is.
TEST_P(AttentionType, Trap06_OneByOne) {
  expect_matches_float64(shape_of(3, 1, 2, 64, true, GetParam()));
}

// Rows after the sequence are the next batch's: whatever they hold, no tile may take part of it.
TEST_P(AttentionType, Trap26_RowsBeyondTheSequence) {
  for (const int head_size : {32, 128})
    for (const bool causal : {false, true}) {
      const AttentionShape one = shape_of(1, 33, 1, head_size, causal, GetParam());
      AttentionShape two = one;
      two.batch = 2;
      const Values v = random_values(one, 11);
      Values poisoned = v;
      poisoned.qkv.resize(2 * v.qkv.size(), NAN);
      poisoned.dout.resize(2 * v.dout.size(), NAN);
      const Results<float> alone = run(one, v);
      Results<float> before_nan = run(two, poisoned);
      before_nan.out.resize(alone.out.size());
      before_nan.dqkv.resize(alone.dqkv.size());
      expect_same_bits("out", alone.out, before_nan.out);
      expect_same_bits("dqkv", alone.dqkv, before_nan.dqkv);
    }
}

// Between the compiled head sizes, on scratch and outputs that start as NaN.
TEST_P(AttentionType, Trap10_HeadSizesThatNeedPadding) {
  for (const int head_size : {16, 40, 72, 104})
    expect_matches_float64(shape_of(1, 65, 2, head_size, true, GetParam()));
}

// 70,000 heads: a grid's y and z end at 65,535. With one key the probability is exactly 1.
TEST_P(AttentionType, Trap04_MoreHeadsThanAGridDimension) {
  if (kSanitized) GTEST_SKIP() << "the grid is the same without sanitizers";
#if defined(MINILLM_SIM)
  if (GetParam() == DType::kBf16)
    GTEST_SKIP() << "the grid is that of fp32, whose blocks are simulated faster";
#endif
  const AttentionShape s = shape_of(35'000, 1, 2, 8, false, GetParam());
  const Values v = random_values(s, 9);
  const Tensor qkv(s.dtype, v.qkv), out(s.dtype, std::ssize(v.dout));
  const DeviceArray<float> lse(rows_of(s));
  attention_forward({.shape = s, .out = out.data(), .lse = lse.get(), .qkv = qkv.data()}, nullptr);
  std::vector<float> expected;
  for (int64_t i = 0; i < std::ssize(v.qkv); ++i)
    if (part_of(s, i) == 2) expected.push_back(v.qkv[i]);
  EXPECT_EQ(out.values(), expected);
}

TEST(Attention, Trap04_GridsOfTheBackwardPass) {
  const AttentionLayout layout{1'000'000, 200, 2, 1, 64, 1.0f, true};
  EXPECT_EQ(attention_blocks(layout, layout.heads, 4), 8'000'000u);
  const AttentionLayout too_many{1'000'000, 100'000, 2, 1, 64, 1.0f, true};
  EXPECT_THROW(attention_blocks(too_many, layout.heads, 1563), std::exception);
}

// Offsets of rows and statistics beyond 2^31 elements.
TEST(Attention, Trap02_OffsetsOf64Bits) {
  AttentionLayout layout{64, 1 << 20, 64, 8, 128, 1.0f, true};
  EXPECT_EQ(statistics_offset(layout, 63, 63), int64_t{64 * 64 - 1} << 20);
  layout.sequence = 1 << 17;
  float* const base = nullptr;
  const auto rows = packed_rows(base, layout, 3, 7, Part::kValue);
  const int64_t width = (64 + 16) * 128;
  EXPECT_EQ(reinterpret_cast<uintptr_t>(rows.row(layout.sequence - 1)) / sizeof(float),
            (int64_t{4} * layout.sequence - 1) * width + (64 + 8 + 7) * 128);
}

TEST(Attention, Trap05_MisalignedTensors) {
  const AttentionShape s = shape_of(1, 4, 1, 16, false, DType::kBf16);
  const Tensor qkv(s.dtype, 4 * 48, 1), out(s.dtype, 4 * 16);
  const DeviceArray<float> lse(4);
  try {
    attention_forward({.shape = s, .out = out.data(), .lse = lse.get(), .qkv = qkv.data()}, nullptr);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("multiple of 16 bytes"), std::string::npos) << error.what();
  }
}

TEST(Attention, EmptyBatchIsNoError) {
  EXPECT_NO_THROW(run(shape_of(0, 5, 2, 16, false, DType::kBf16), {}));
}

TEST(Attention, HeadSizesThatAreNotAllowed) {
  for (const int head_size : {0, 4, 12, 136}) {
    const AttentionShape s = shape_of(1, 4, 1, head_size, false, DType::kBf16);
    try {
      attention_forward({.shape = s}, nullptr);
      ADD_FAILURE() << head_size;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("head size " + std::to_string(head_size)), std::string::npos);
    }
    EXPECT_THROW(attention_backward({.shape = s}, nullptr), UsageError);
  }
}

TEST(Attention, ScalesAndHeadsThatAreNotAllowed) {
  for (const float scale : {0.0f, -1.0f, INFINITY, NAN}) {
    AttentionShape s = shape_of(1, 4, 1, 16, false, DType::kBf16);
    s.scale = scale;
    EXPECT_THROW(attention_forward({.shape = s}, nullptr), UsageError) << scale;
  }
  EXPECT_THROW(attention_forward({.shape = shape_of(1, 4, 6, 16, false, DType::kBf16, 4)}, nullptr),
               UsageError);
  EXPECT_THROW(attention_backward({.shape = shape_of(1, 4, 0, 16, false, DType::kBf16)}, nullptr),
               UsageError);
}

TEST(Attention, Cost) {
  const AttentionShape s = shape_of(2, 10, 3, 16, false, DType::kBf16),
                       causal = shape_of(2, 10, 3, 16, true, s.dtype);
  EXPECT_EQ(attention_forward_cost(s).bytes, 2 * 10 * 3 * (4 * 16 * 2 + 4));
  EXPECT_EQ(attention_forward_cost(s).flops, 2 * 3 * 100 * 16 * 4);
  EXPECT_EQ(attention_backward_cost(s).flops, 2 * 3 * 100 * 16 * 10);
  EXPECT_EQ(attention_forward_cost(causal).flops, 2 * 3 * 55 * 16 * 4);
  const AttentionShape grouped = shape_of(2, 10, 3, 16, false, DType::kBf16, 1);
  EXPECT_EQ(attention_forward_cost(grouped).bytes, 2 * 10 * ((3 + 2 + 3) * 16 * 2 + 3 * 4));
  EXPECT_EQ(attention_backward_cost(grouped).bytes, 2 * 10 * ((2 * 5 + 2 * 3) * 16 * 2 + 3 * 4));
  // q, k, v and dout again in the second pass, dout in the statistics' kernel: but out there is part of the
  // minimum.
  EXPECT_EQ(attention_backward_cost(grouped).extra_bytes, 2 * 10 * ((5 + 2 * 3) * 16 * 2 + 3 * (2 * 4 * 3)));
}

}  // namespace
}  // namespace minillm::kernels::testing
