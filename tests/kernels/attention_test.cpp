#include "kernels/attention.h"

#include "core/error.h"
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

Values random_values(const AttentionShape& s, uint32_t seed, float query_scale = 1) {
  Values v{normal_values(rows_of(s) * 3 * s.head_size, seed),
           normal_values(rows_of(s) * s.head_size, seed + 1)};
  const int64_t width = int64_t{s.heads} * s.head_size;
  for (int64_t i = 0; i < std::ssize(v.qkv); ++i)
    if (i / width % 3 == 0) v.qkv[i] *= query_scale;
  return {rounded(v.qkv, s.dtype), rounded(v.dout, s.dtype)};
}

/// Forward and backward pass as plain loops in `Real`. With Real = float and `out` rounded to the tensors'
/// type this is what any fp32 implementation can reach; its distance from Real = double is the yardstick.
template <class Real>
Results<Real> attention_loop(const AttentionShape& s, const Values& v) {
  const int64_t d = s.head_size, width = s.heads * d;
  Results<Real> r{std::vector<Real>(v.dout.size()), std::vector<Real>(rows_of(s)),
                  std::vector<Real>(v.qkv.size())};
  std::vector<Real> p(s.sequence);
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.heads; ++h)
      for (int64_t t = 0; t < s.sequence; ++t) {
        const auto at = [&](int64_t position, int part) {
          return ((b * s.sequence + position) * 3 + part) * width + h * d;
        };
        const auto dot = [&](const float* x, const float* y) {
          Real sum = 0;
          for (int64_t i = 0; i < d; ++i) sum += static_cast<Real>(x[i]) * static_cast<Real>(y[i]);
          return sum;
        };
        const int64_t keys = s.causal ? t + 1 : s.sequence, row = (b * s.sequence + t) * width + h * d;
        Real maximum = -std::numeric_limits<Real>::infinity(), sum = 0, delta = 0;
        for (int64_t k = 0; k < keys; ++k) {
          p[k] = dot(&v.qkv[at(t, 0)], &v.qkv[at(k, 1)]) * static_cast<Real>(s.scale);
          maximum = std::max(maximum, p[k]);
        }
        for (int64_t k = 0; k < keys; ++k) sum += p[k] = std::exp(p[k] - maximum);
        for (int64_t k = 0; k < keys; ++k) {
          p[k] /= sum;
          for (int64_t i = 0; i < d; ++i) r.out[row + i] += p[k] * v.qkv[at(k, 2) + i];
        }
        r.lse[(b * s.heads + h) * s.sequence + t] = maximum + std::log(sum);

        for (int64_t i = 0; i < d; ++i) {
          if constexpr (std::is_same_v<Real, float>) r.out[row + i] = rounded(r.out[row + i], s.dtype);
          delta += r.out[row + i] * v.dout[row + i];
        }
        for (int64_t k = 0; k < keys; ++k) {
          const Real ds = p[k] * (dot(&v.dout[row], &v.qkv[at(k, 2)]) - delta) * static_cast<Real>(s.scale);
          for (int64_t i = 0; i < d; ++i) {
            r.dqkv[at(t, 0) + i] += ds * v.qkv[at(k, 1) + i];
            r.dqkv[at(k, 1) + i] += ds * v.qkv[at(t, 0) + i];
            r.dqkv[at(k, 2) + i] += p[k] * v.dout[row + i];
          }
        }
      }
  return r;
}

/// Runs both passes on poisoned memory; `offset` elements misalign every tensor.
Results<float> run(const AttentionShape& s, const Values& v, int64_t offset = 0) {
  const Tensor qkv(s.dtype, v.qkv, offset), dout(s.dtype, v.dout, offset);
  const Tensor out(s.dtype, std::ssize(v.dout), offset), dqkv(s.dtype, std::ssize(v.qkv), offset);
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
/// plus `slack` times the largest element.
double relative_distance(const std::vector<float>& actual, const std::vector<double>& reference,
                         const std::vector<float>& plain, double factor, DType type, double slack = 0) {
  double squares = 0, largest = 0;
  for (const double x : reference) squares += x * x, largest = std::max(largest, std::abs(x));
  const double unit = ulp(std::sqrt(squares / static_cast<double>(reference.size())), type);
  return distance(actual, reference) /
         (factor * distance(rounded(plain, type), reference) + unit + slack * largest);
}

std::string describe(const AttentionShape& s) {
  return std::string(name_of(s.dtype)) + " batch " + std::to_string(s.batch) + " sequence " +
         std::to_string(s.sequence) + " heads " + std::to_string(s.heads) + " head size " +
         std::to_string(s.head_size) + (s.causal ? " causal" : "");
}

AttentionShape shape_of(int64_t batch, int sequence, int heads, int head_size, bool causal, DType type) {
  return {batch, sequence, heads, head_size, causal, 1 / std::sqrt(static_cast<float>(head_size)), type};
}

void expect_matches_float64(const AttentionShape& s, float query_scale = 1) {
  SCOPED_TRACE(describe(s));
  const Values v = random_values(s, 17, query_scale);
  const Results<float> actual = run(s, v), plain = attention_loop<float>(s, v);
  const Results<double> reference = attention_loop<double>(s, v);
  EXPECT_LE(relative_distance(actual.out, reference.out, plain.out, 2, s.dtype), 1) << "out";
  EXPECT_LE(relative_distance(actual.lse, reference.lse, plain.lse, 2, DType::kFp32), 1) << "lse";
  // The backward pass recomputes p = exp(score - lse): score and lse are each rounded twice on the way to
  // base 2.
  double slack = 0;
  for (const double lse : reference.lse) slack = std::max(slack, 4 * 0x1p-24 * std::abs(lse));
  const int64_t width = int64_t{s.heads} * s.head_size;
  for (int part = 0; part < 3; ++part) {
    const auto part_of = [&](const auto& packed) {
      auto result = packed;
      result.clear();
      for (int64_t i = 0; i < std::ssize(packed); ++i)
        if (i / width % 3 == part) result.push_back(packed[i]);
      return result;
    };
    EXPECT_LE(relative_distance(part_of(actual.dqkv), part_of(reference.dqkv), part_of(plain.dqkv), 3,
                                s.dtype, slack),
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
  for (const int head_size : {8, 24, 32, 64, 96, 128})
    for (const int sequence : {1, 7, 33, 64, 100, 130})
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

TEST_P(AttentionType, NegativeScale) {
  AttentionShape s = shape_of(1, 70, 1, 32, false, GetParam());
  s.scale = -s.scale;
  expect_matches_float64(s, 20);
}

TEST_P(AttentionType, MisalignedTensorsGiveTheSameBits) {
  for (const int head_size : {24, 128}) {
    const AttentionShape s = shape_of(1, 70, 3, head_size, true, GetParam());
    const Values v = random_values(s, 3);
    const Results<float> aligned = run(s, v), misaligned = run(s, v, 1);
    expect_same_bits("out", aligned.out, misaligned.out);
    expect_same_bits("dqkv", aligned.dqkv, misaligned.dqkv);
  }
}

TEST_P(AttentionType, Repeatable) {
  const AttentionShape s = shape_of(2, 130, 2, 32, true, GetParam());
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
TEST(Attention, CausalMaskHidesTheFuture) {
  const AttentionShape s = shape_of(1, 130, 1, 32, true, DType::kFp32);
  const int64_t width = 3 * s.head_size;
  Values v = random_values(s, 6);
  const Results<float> before = run(s, v);
  constexpr int64_t kChanged = 70;
  for (int64_t i = kChanged * width; i < std::ssize(v.qkv); ++i) v.qkv[i] = 1000 - v.qkv[i];
  const Results<float> after = run(s, v);
  const auto past = [&](std::vector<float> x, int64_t row) {
    x.resize(kChanged * row);
    return x;
  };
  expect_same_bits("out", past(before.out, s.head_size), past(after.out, s.head_size));
  expect_same_bits("lse", past(before.lse, 1), past(after.lse, 1));
  EXPECT_NE(before.out.back(), after.out.back());
}

TEST(Attention, NanPoisonsTheRowsThatSeeIt) {
  const AttentionShape s = shape_of(1, 130, 1, 32, true, DType::kFp32);
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

// Scores of -inf have probability 0, also where they fill a whole tile and the maximum so far is -inf.
TEST(Attention, ScoresOfMinusInfinity) {
  const AttentionShape s = shape_of(1, 130, 1, 32, false, DType::kFp32);
  const int64_t width = 3 * s.head_size;
  Values v = random_values(s, 8);
  for (int64_t t = 0; t < s.sequence; ++t) v.qkv[t * width] = 1;
  for (int64_t t = 0; t < 64; ++t) v.qkv[t * width + s.head_size] = -INFINITY;
  const Results<float> r = run(s, v);
  const Results<double> reference = attention_loop<double>(s, v);
  EXPECT_LT(distance(r.out, reference.out), 1e-5);
  EXPECT_LT(distance(r.lse, reference.lse), 1e-5);

  for (int64_t t = 0; t < s.sequence; ++t) v.qkv[t * width + s.head_size] = -INFINITY;
  for (const float x : run(s, v).out) EXPECT_TRUE(std::isnan(x)) << "a softmax over nothing has no value";
}

// 66,000 blocks: a grid's y and z end at 65,535. With one key the probability is exactly 1.
TEST(Attention, MoreHeadsThanAGridDimension) {
  const AttentionShape s = shape_of(33'000, 1, 2, 8, false, DType::kBf16);
  const Values v = random_values(s, 9);
  const Results<float> r = run(s, v);
  const int64_t width = int64_t{s.heads} * s.head_size;
  std::vector<float> out, dqkv;
  for (int64_t b = 0; b < s.batch; ++b) {
    out.insert(out.end(), &v.qkv[(b * 3 + 2) * width], &v.qkv[(b * 3 + 2) * width] + width);
    dqkv.insert(dqkv.end(), 2 * width, 0);
    dqkv.insert(dqkv.end(), &v.dout[b * width], &v.dout[b * width] + width);
  }
  EXPECT_EQ(r.out, out);
  // p = exp(score - lse) is 1 up to the rounding of lse, so dscore is not exactly 0.
  double largest = 0;
  for (size_t i = 0; i < dqkv.size(); ++i) largest = std::max<double>(largest, std::abs(r.dqkv[i] - dqkv[i]));
  EXPECT_LT(largest, 0.02);
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

TEST(Attention, Cost) {
  const AttentionShape s = shape_of(2, 10, 3, 16, false, DType::kBf16),
                       causal = shape_of(2, 10, 3, 16, true, s.dtype);
  EXPECT_EQ(attention_forward_cost(s).bytes, 2 * 10 * 3 * (4 * 16 * 2 + 4));
  EXPECT_EQ(attention_forward_cost(s).flops, 2 * 3 * 100 * 16 * 4);
  EXPECT_EQ(attention_backward_cost(s).flops, 2 * 3 * 100 * 16 * 10);
  EXPECT_EQ(attention_forward_cost(causal).flops, 2 * 3 * 55 * 16 * 4);
}

}  // namespace
}  // namespace minillm::kernels::testing
