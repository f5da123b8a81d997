// Gradients against differences of losses.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/model/model_rig.h"

namespace minillm::model::test {
namespace {

constexpr float kValidCount = 16;

double loss(ModelRig& rig) {
  const int head = rig.transformer().head_unit();
  for (int unit = 0; unit < head; ++unit) rig.run({.kind = shard::OpKind::kForward, .unit = unit});
  rig.run({.kind = shard::OpKind::kHeadLoss, .unit = head});
  return rig.loss_sums()[0];
}

/// How much the loss changes with the tensor along its gradient, per unit of length.
double slope(ModelRig& rig, int unit, const shard::Slice& slice, const std::vector<float>& gradient,
             double length) {
  constexpr double kStep = 0.005;
  const std::vector<float> weights = rig.weights(unit);
  double losses[2];
  for (const int side : {0, 1}) {
    std::vector<float> moved = weights;
    for (size_t i = 0; i < gradient.size(); ++i)
      moved[static_cast<size_t>(slice.offset) + i] +=
          static_cast<float>((side == 0 ? -kStep : kStep) * gradient[i] / length);
    rig.set_weights(unit, moved);
    losses[side] = loss(rig);
  }
  rig.set_weights(unit, weights);
  return (losses[1] - losses[0]) / (2 * kStep);
}

// Slopes of the loss's sum are between 2 and 130 here. The difference is off by the third derivative times
// the square of the step, which is 0.2 % for the worst of them, the head; and by fp32 rounding of a loss of
// about 100, 1e-5 over two steps of 0.005: at most 0.1 %.
TEST(Gradients, AreTheSlopesOfTheLoss) {
  if (kSanitized) GTEST_SKIP() << "the same accesses again";
  for (const bool parts : {true, false}) {
    ModelRig rig({.dtype = DType::kFp32, .rope_and_final_norm = parts}, kValidCount);
    run_all(rig, micro_batch(rig, /*split=*/false));
    for (int unit = 0; unit < std::ssize(rig.layout().units); ++unit) {
      const std::vector<float> all = rig.gradients(unit);
      for (const shard::Slice& slice : rig.layout().units[static_cast<size_t>(unit)].slices) {
        const auto begin = all.begin() + slice.offset;
        const std::vector<float> gradient(begin, begin + slice.elements);
        double square = 0;
        for (const float value : gradient) square += double{value} * value;
        const double length = std::sqrt(square), expected = length * kValidCount;
        EXPECT_NEAR(slope(rig, unit, slice, gradient, length), expected, 0.01 * expected) << slice.name;
      }
    }
  }
}

}  // namespace
}  // namespace minillm::model::test
