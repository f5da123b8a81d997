#include "kernels/adamw.h"

#include <optional>

#include "kernels/device/tiling.h"
#include "tests/kernels/support.h"

namespace minillm::kernels::testing {
namespace {

constexpr double kLearningRate = 3e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8, kWeightDecay = 0.1;

/// The optimizer's state on the host, in the precision `Real`.
template <class Real>
struct State {
  std::vector<Real> master, moment1, moment2;
};

template <class Real>
State<Real> initial_state(int64_t count) {
  const std::vector<float> values = normal_values(count, 1);
  return {{values.begin(), values.end()}, std::vector<Real>(count), std::vector<Real>(count)};
}

/// torch.optim.AdamW's update of one tensor.
template <class Real>
void step_loop(State<Real>& s, const std::vector<float>& gradient, float scale, int64_t step) {
  const Real step_size = kLearningRate / (1 - std::pow(kBeta1, step));
  const Real root = std::sqrt(1 - std::pow(kBeta2, step));
  for (size_t i = 0; i < gradient.size(); ++i) {
    const Real g = Real(gradient[i]) * Real(scale);
    s.master[i] -= Real(kLearningRate * kWeightDecay) * s.master[i];
    s.moment1[i] += Real(1 - kBeta1) * (g - s.moment1[i]);
    s.moment2[i] = Real(kBeta2) * s.moment2[i] + Real(1 - kBeta2) * g * g;
    s.master[i] -= step_size * s.moment1[i] / (std::sqrt(s.moment2[i]) / root + Real(kEpsilon));
  }
}

/// The optimizer's state on the device.
struct Device {
  Device(int64_t count, int64_t offset, bool copy)
      : master(DType::kFp32, normal_values(count, 1), offset),
        moment1(DType::kFp32, std::vector<float>(count)),
        moment2(DType::kFp32, std::vector<float>(count)) {
    if (copy) parameter.emplace(DType::kBf16, count, offset);
  }
  void update(const std::vector<float>& gradient_values, float scale_value, int64_t step) const {
    const DeviceArray<float> gradient(gradient_values), scale(std::vector<float>{scale_value});
    adamw({.master = master.as<float>(),
           .moment1 = moment1.as<float>(),
           .moment2 = moment2.as<float>(),
           .parameter = parameter ? parameter->data() : nullptr,
           .gradient = gradient.get(),
           .gradient_scale = scale.get(),
           .count = std::ssize(gradient_values),
           .learning_rate = kLearningRate,
           .beta1 = kBeta1,
           .beta2 = kBeta2,
           .epsilon = kEpsilon,
           .weight_decay = kWeightDecay,
           .step = step},
          nullptr);
    check(cudaDeviceSynchronize());
  }
  Tensor master, moment1, moment2;
  std::optional<Tensor> parameter;
};

TEST(AdamW, MatchesFloat64OverSteps) {
  for (const int64_t count : {1, 7, 33, 1025, 4096})
    for (const int64_t offset : {0, 1}) {
      const Device device(count, offset, true);
      State<double> reference = initial_state<double>(count);
      State<float> plain = initial_state<float>(count);
      for (int64_t step = 1; step <= 5; ++step) {
        // Gradients of very different size, one of them exactly 0: 0 / (0 + epsilon).
        std::vector<float> gradient = normal_values(count, 10 + step, step % 2 == 0 ? 1e-4f : 10);
        gradient[0] = 0;
        device.update(gradient, 0.5f, step);
        step_loop(reference, gradient, 0.5f, step);
        step_loop(plain, gradient, 0.5f, step);
        const std::string at = std::to_string(count) + " elements, step " + std::to_string(step) + ": ";
        // A parameter near 0 is the difference of larger ones.
        std::vector<double> magnitude;
        for (const double p : reference.master) magnitude.push_back(std::abs(p) + kLearningRate);
        expect_close(at + "master", device.master.values(), reference.master, plain.master, DType::kFp32,
                     magnitude);
        // The moment is a difference too: of terms up to the gradients of step 1.
        const std::vector<double> gradients(count, 10);
        expect_close(at + "moment1", device.moment1.values(), reference.moment1, plain.moment1, DType::kFp32,
                     gradients);
        expect_close(at + "moment2", device.moment2.values(), reference.moment2, plain.moment2, DType::kFp32);
        expect_same_bits(at + "parameter", device.parameter->values(),
                         rounded(device.master.values(), DType::kBf16));
      }
    }
}

TEST(AdamW, WithoutACopyTheMasterIsTheSame) {
  const Device with(1025, 0, true), without(1025, 0, false);
  const std::vector<float> gradient = normal_values(1025, 2);
  with.update(gradient, 1, 1);
  without.update(gradient, 1, 1);
  expect_same_bits("master", with.master.read(), without.master.read());
}

TEST(AdamW, SkipsWhenTheScaleIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float scale : {NAN, infinity, -infinity}) {
    const Device device(1025, 0, true);
    const std::vector<float> gradient = normal_values(1025, 3);
    const auto parameter = device.parameter->read();  // poison: not even this is written
    const auto master = device.master.read(), moment1 = device.moment1.read(),
               moment2 = device.moment2.read();
    device.update(gradient, scale, 1);
    expect_same_bits("master", device.master.read(), master);
    expect_same_bits("moment1", device.moment1.read(), moment1);
    expect_same_bits("moment2", device.moment2.read(), moment2);
    expect_same_bits("parameter", device.parameter->read(), parameter);
  }
}

TEST(AdamW, SplitRangesGiveTheSameBits) {
  constexpr int64_t kCount = 1000;
  const std::vector<float> gradient = normal_values(kCount, 4);
  const Device whole(kCount, 0, true);
  whole.update(gradient, 1, 1);

  const Device split(kCount, 0, true);
  const DeviceArray<float> device_gradient(gradient), scale(std::vector<float>{1});
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 333}, {333, 667}})
    adamw({.master = split.master.as<float>() + first,
           .moment1 = split.moment1.as<float>() + first,
           .moment2 = split.moment2.as<float>() + first,
           .parameter = split.parameter->as<uint16_t>() + first,
           .gradient = device_gradient.get() + first,
           .gradient_scale = scale.get(),
           .count = count,
           .learning_rate = kLearningRate,
           .beta1 = kBeta1,
           .beta2 = kBeta2,
           .epsilon = kEpsilon,
           .weight_decay = kWeightDecay,
           .step = 1},
          nullptr);
  expect_same_bits("master", whole.master.read(), split.master.read());
  expect_same_bits("parameter", whole.parameter->read(), split.parameter->read());
}

TEST(AdamW, Repeatable) {
  expect_repeatable("adamw", [] {
    const Device device(3000, 0, true);
    device.update(normal_values(3000, 5), 1, 3);
    return device.master.read();
  });
}

// The last block of a shard of more than 2^31 elements: a thread's four elements and their number.
TEST(AdamW, Trap03_PositionsBeyond32Bits) {
  constexpr int64_t kCount = (int64_t{1} << 33) + 4 * 77;
  constexpr int kThreads = 256, kWidth = 4;
  const int64_t last_block = int64_t{blocks_for(kCount, kThreads * kWidth)} - 1;
  EXPECT_EQ(first_element(last_block, 76, kThreads, 0, 1, kWidth), kCount - kWidth);
  EXPECT_GE(first_element(last_block, 77, kThreads, 0, 1, kWidth), kCount);
  const int32_t narrow_position = static_cast<int32_t>(last_block * kThreads * kWidth);
  EXPECT_NE(narrow_position, last_block * kThreads * kWidth) << "32 bits would do: the test shows nothing";
}

TEST(AdamW, Cost) {
  constexpr int64_t kCount = int64_t{1} << 33;
  EXPECT_EQ(adamw_cost(kCount, true).bytes, 30 * kCount);
  EXPECT_EQ(adamw_cost(kCount, false).bytes, 28 * kCount);
  EXPECT_EQ(adamw_cost(kCount, true, DType::kBf16).bytes, 22 * kCount);
}

struct Clip {
  float factor, norm;
};
Clip run_clip(float sum_of_squares, float limit) {
  const DeviceArray<float> factor(1), norm(1), sum(std::vector<float>{sum_of_squares});
  clip_factor({.factor = factor.get(), .norm = norm.get(), .sum_of_squares = sum.get(), .limit = limit},
              nullptr);
  return {factor.values()[0], norm.values()[0]};
}

// The limit applies to the norm, 4, and not to its square; above it the factor stays 1.
TEST(ClipFactor, Trap20_AsPyTorch) {
  EXPECT_FLOAT_EQ(run_clip(16, 0.5f).factor, 0.5f / (4 + 1e-6f));
  EXPECT_FLOAT_EQ(run_clip(16, 2).factor, 2 / (4 + 1e-6f));
  EXPECT_EQ(run_clip(16, 5).factor, 1);
  EXPECT_EQ(run_clip(16, 5).norm, 4);
  EXPECT_EQ(run_clip(0, 1).factor, 1);
}

TEST(ClipFactor, WithoutALimit) {
  EXPECT_EQ(run_clip(16, 0).factor, 1);
  EXPECT_EQ(run_clip(16, -1).factor, 1);
  EXPECT_EQ(run_clip(16, 0).norm, 4);
}

TEST(ClipFactor, ANormThatIsNotFiniteIsNaNWithAndWithoutALimit) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float limit : {0.0f, 1.0f}) {
    EXPECT_TRUE(std::isnan(run_clip(infinity, limit).factor));
    EXPECT_TRUE(std::isnan(run_clip(NAN, limit).factor));
    EXPECT_EQ(run_clip(infinity, limit).norm, infinity);
  }
}

}  // namespace
}  // namespace minillm::kernels::testing
