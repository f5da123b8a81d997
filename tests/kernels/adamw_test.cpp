#include "kernels/adamw.h"

#include "core/error.h"
#include "kernels/device/tiling.h"
#include "tests/kernels/masters.h"

namespace minillm::kernels::testing {
namespace {

constexpr double kLearningRate = 3e-3, kBeta1 = 0.9, kBeta2 = 0.999, kEpsilon = 1e-8, kWeightDecay = 0.1;
constexpr AdamWOptions kOptions = {
    .beta1 = kBeta1, .beta2 = kBeta2, .epsilon = kEpsilon, .weight_decay = kWeightDecay};

/// The numbers of a step on the device.
DeviceArray<AdamWStep> device_step(int64_t step) {
  return DeviceArray<AdamWStep>(std::vector<AdamWStep>{adamw_step(kOptions, kLearningRate, step)});
}

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
  Device(int64_t count, int64_t offset, bool halves)
      : master(normal_values(count, 1), halves, offset),
        moment1(DType::kFp32, std::vector<float>(count)),
        moment2(DType::kFp32, std::vector<float>(count)) {}
  void update(const std::vector<float>& gradient_values, float scale_value, int64_t step) const {
    const DeviceArray<float> gradient(gradient_values), scale(std::vector<float>{scale_value});
    const DeviceArray<AdamWStep> numbers = device_step(step);
    enqueue(gradient, scale, numbers, 0, std::ssize(gradient_values));
    check(cudaDeviceSynchronize());
  }
  /// Updates elements [first, first + count).
  void enqueue(const DeviceArray<float>& gradient, const DeviceArray<float>& scale,
               const DeviceArray<AdamWStep>& step, int64_t first, int64_t count) const {
    adamw({.parameter = master.parameter(first),
           .lower_half = master.lower_half(first),
           .moment1 = moment1.as<float>() + first,
           .moment2 = moment2.as<float>() + first,
           .gradient = gradient.get() + first,
           .gradient_scale = scale.get(),
           .step = step.get(),
           .count = count,
           .options = kOptions},
          nullptr);
  }
  Masters master;
  Tensor moment1, moment2;
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
        expect_same_bits(at + "parameter", device.master.parameters(), upper_halves(device.master.values()));
      }
    }
}

// Nothing of an fp32 master is lost in two halves, however small its changes are.
TEST(AdamW, MastersInHalvesAreTheSame) {
  for (const int64_t offset : {0, 1}) {
    const Device halves(1025, offset, true), whole(1025, offset, false);
    for (int64_t step = 1; step <= 20; ++step) {
      const std::vector<float> gradient = normal_values(1025, 2 + step);
      for (const Device* device : {&halves, &whole}) device->update(gradient, 1, step);
    }
    expect_same_bits("master", halves.master.values(), whole.master.values());
    EXPECT_NE(halves.master.values(), normal_values(1025, 1)) << "planted: updates must be seen";
  }
}

TEST(AdamW, SkipsWhenTheScaleIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float scale : {NAN, infinity, -infinity}) {
    const Device device(1025, 0, true);
    const std::vector<float> gradient = normal_values(1025, 3);
    const auto master = device.master.values(), parameter = device.master.parameters();
    const auto moment1 = device.moment1.read(), moment2 = device.moment2.read();
    device.update(gradient, scale, 1);
    expect_same_bits("master", device.master.values(), master);
    expect_same_bits("moment1", device.moment1.read(), moment1);
    expect_same_bits("moment2", device.moment2.read(), moment2);
    expect_same_bits("parameter", device.master.parameters(), parameter);
  }
}

// What a replayed CUDA graph does: the same launch again and again, with only the step's numbers written
// anew.
TEST(AdamW, TheStepIsReadWhenTheKernelRuns) {
  constexpr int64_t kCount = 1025, kSteps = 4;
  const std::vector<float> values = normal_values(kCount, 6);
  const Device replayed(kCount, 0, true), expected(kCount, 0, true), stale(kCount, 0, true);
  const DeviceArray<float> gradient(values), scale(std::vector<float>{1});
  const DeviceArray<AdamWStep> step(1), first = device_step(1);
  std::vector<AdamWStep> steps;
  for (int64_t t = 1; t <= kSteps; ++t) steps.push_back(adamw_step(kOptions, kLearningRate / t, t));
  for (const AdamWStep& now : steps) {
    check(cudaMemcpyAsync(step.data(), &now, sizeof(now), cudaMemcpyHostToDevice, nullptr));
    replayed.enqueue(gradient, scale, step, 0, kCount);
    stale.enqueue(gradient, scale, first, 0, kCount);
  }
  for (const AdamWStep& now : steps)
    expected.enqueue(gradient, scale, DeviceArray<AdamWStep>(std::vector<AdamWStep>{now}), 0, kCount);
  expect_same_bits("master", replayed.master.values(), expected.master.values());
  EXPECT_NE(stale.master.values(), expected.master.values())
      << "planted: numbers that do not change must be seen";
}

TEST(AdamW, NumbersOfAStep) {
  for (const int64_t t : {int64_t{1}, int64_t{2}, int64_t{1000}, int64_t{1} << 40}) {
    const AdamWStep step = adamw_step(kOptions, kLearningRate, t);
    const double bias1 = 1 - std::pow(kBeta1, static_cast<double>(t));
    const double bias2 = 1 - std::pow(kBeta2, static_cast<double>(t));
    EXPECT_EQ(step.step, t);
    EXPECT_EQ(step.learning_rate, kLearningRate);
    EXPECT_EQ(step.step_size, static_cast<float>(kLearningRate / bias1));
    EXPECT_EQ(step.correction, static_cast<float>(1 / std::sqrt(bias2)));
  }
  // In fp32 the second correction is off in its fourth digit: 1 - 0.999 has lost the others.
  EXPECT_GT(std::abs(1 / std::sqrt(1 - 0.999f) / adamw_step(kOptions, kLearningRate, 1).correction - 1),
            5e-6);
  for (const int64_t t : {0, -1}) EXPECT_THROW(adamw_step(kOptions, kLearningRate, t), InternalError) << t;
}

// Infinite or NaN, as it is or once it is scaled, or with a square beyond fp32: the element stays as it was,
// and the others are updated as if it were not there.
TEST(AdamW, AnElementWhoseGradientIsNotFiniteStays) {
  constexpr int64_t kCount = 1025;
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> finite = normal_values(kCount, 7);
  for (const int64_t offset : {0, 1}) {
    const Device device(kCount, offset, true), reference(kCount, offset, true);
    for (const Device* d : {&device, &reference}) d->update(finite, 4, 1);
    const std::vector<float> master = device.master.values(), moment1 = device.moment1.values(),
                             moment2 = device.moment2.values();
    std::vector<float> bad = finite;
    const std::vector<int64_t> at = {0, 1, 6, 511, kCount - 1};
    const std::vector<float> values = {infinity, -infinity, NAN, 0x1p127f, 1e30f};
    for (size_t i = 0; i < at.size(); ++i) bad[at[i]] = values[i];
    device.update(bad, 4, 2);
    reference.update(finite, 4, 2);
    const auto expected = [&](const auto& updated, const std::vector<float>& before) {
      std::vector<float> result = updated.values();
      for (const int64_t i : at) {
        EXPECT_NE(result[i], before[i]) << "planted: an update of element " << i << " must be seen";
        result[i] = before[i];
      }
      return result;
    };
    const std::vector<float> expected_master = expected(reference.master, master);
    expect_same_bits("master", device.master.values(), expected_master);
    expect_same_bits("moment1", device.moment1.values(), expected(reference.moment1, moment1));
    expect_same_bits("moment2", device.moment2.values(), expected(reference.moment2, moment2));
    expect_same_bits("parameter", device.master.parameters(), upper_halves(expected_master));
  }
}

TEST(AdamW, SplitRangesGiveTheSameBits) {
  constexpr int64_t kCount = 1000;
  const std::vector<float> gradient = normal_values(kCount, 4);
  const Device whole(kCount, 0, true);
  whole.update(gradient, 1, 1);

  const Device split(kCount, 0, true);
  const DeviceArray<float> device_gradient(gradient), scale(std::vector<float>{1});
  const DeviceArray<AdamWStep> step = device_step(1);
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 333}, {333, 667}})
    split.enqueue(device_gradient, scale, step, first, count);
  expect_same_bits("master", whole.master.values(), split.master.values());
}

TEST(AdamW, Repeatable) {
  expect_repeatable("adamw", [] {
    const Device device(3000, 0, true);
    device.update(normal_values(3000, 5), 1, 3);
    return device.master.values();
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
  EXPECT_EQ(adamw_cost(kCount).bytes, 28 * kCount);
  EXPECT_EQ(adamw_cost(kCount, DType::kBf16).bytes, 20 * kCount);
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
