#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <map>

#include "fixtures.h"
#include "shard/fsdp2.h"

namespace minillm::shard {
namespace {

// The reference model: 12 blocks of dimension 2048, a vocabulary of 32000.
constexpr int kBlocks = 12, kHead = kBlocks + 1;
constexpr int64_t kDim = 2048, kRows = 8192, kActivation = kRows * kDim * 2;
constexpr int64_t kBlockElements = 12 * kDim * kDim + 6 * kDim;
constexpr int64_t kRootElements = 2 * kDim * 32000;
constexpr int64_t kInputBytes = (8 + 8) * kRows;  // tokens and targets
constexpr int64_t kElements = kRootElements + kBlocks * kBlockElements;

Layout reference_layout(int world) {
  std::vector<UnitSpec> units;
  units.push_back({"embedding", {{"weight", {32000, kDim}}}, 1});
  for (int i = 0; i < kBlocks; ++i)
    units.push_back({numbered("block", i),
                     {{"norm1", {kDim}},
                      {"in", {3 * kDim, kDim}},
                      {"in_bias", {3 * kDim}},
                      {"out", {kDim, kDim}},
                      {"out_bias", {kDim}},
                      {"norm2", {kDim}},
                      {"up", {4 * kDim, kDim}},
                      {"down", {kDim, 4 * kDim}}},
                     0});
  units.push_back({"head", {{"weight", {32000, kDim}}}, 1});
  return make_layout(units, world);
}

Fsdp2Options reference_options() {
  return {.memory = {.inputs = kInputBytes,
                     .residual = kActivation,
                     .block_saved = 15 * kActivation,
                     .block_forward_extra = kActivation,
                     .block_backward = 5 * kActivation,
                     .loss = 3 * kRows * 32000 * 2}};
}

TEST(Fsdp2Memory, ReferenceHasTheParametersThatItShouldHave) {
  EXPECT_EQ(kElements, 735'199'232);
  EXPECT_EQ(reference_layout(8).elements(), kElements);
  EXPECT_EQ(8 * reference_layout(8).shard_elements(), kElements) << "no padding";
}

// Bytes that a rank sends in the collectives of a kind.
double wire_bytes(const Fsdp2& step, const Layout& layout, OpKind kind, int64_t element_bytes) {
  double bytes = 0;
  for (const Operation& operation : step.schedule.operations)
    if (operation.kind == kind) {
      const UnitLayout& unit = layout.units[static_cast<size_t>(operation.unit)];
      bytes += static_cast<double>(element_bytes * (unit.padded_elements - unit.shard_elements));
    }
  return bytes;
}

TEST(Fsdp2Memory, BytesOnTheWireOfTheReference) {
  const struct {
    int world;
    double gathers, reductions;
  } cases[] = {{2, 1.339e9, 1.470e9}, {4, 2.009e9, 2.206e9}, {8, 2.344e9, 2.573e9}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.world);
    const Layout layout = reference_layout(c.world);
    const Fsdp2 step = build_fsdp2(layout, reference_options());
    EXPECT_TRUE(step.schedule.one_communicator);
    EXPECT_EQ(step.schedule.world(), c.world);
    const double gathers = wire_bytes(step, layout, OpKind::kGather, 2);
    const double reductions = wire_bytes(step, layout, OpKind::kReduceScatter, 4);
    EXPECT_NEAR(gathers, c.gathers, 0.001 * c.gathers);
    EXPECT_NEAR(reductions, c.reductions, 0.001 * c.reductions);
    const double part = (c.world - 1.0) / c.world;
    EXPECT_NEAR(gathers + reductions,
                part * static_cast<double>(2 * (kRootElements + 24 * kBlockElements) + 4 * kElements), 1);
  }
}

TEST(Fsdp2Memory, CopiesOfTheReference) {
  for (int world : {1, 8}) {
    const Layout layout = reference_layout(world);
    Fsdp2Options options = reference_options();
    options.clip = true;
    std::map<OpKind, int64_t> bytes;
    for (const Operation& operation : build_fsdp2(layout, options).schedule.operations)
      if (const int64_t copied = copy_bytes(operation, layout, DType::kBf16); copied > 0)
        bytes[operation.kind] += copied;
    const int64_t gathered = kRootElements + 2 * kBlockElements * kBlocks;
    std::map<OpKind, int64_t> expected = {{OpKind::kReduceCopyIn, (2 + 4) * kElements},
                                          {OpKind::kClip, (4 + 4) * kElements / world}};
    if (world == 1) {
      expected[OpKind::kCopyOut] = (4 + 2 + 2 + 2) * gathered;  // cast and copied in one place
    } else {
      expected[OpKind::kCopyIn] = (4 + 2 + 2 + 2) * gathered / world;
      expected[OpKind::kCopyOut] = (2 + 2) * gathered;
    }
    EXPECT_EQ(bytes, expected);
  }
}

TEST(Fsdp2Memory, WeightsInFp32AreCopiedInWithoutACast) {
  const Layout layout = make_layout(make_units(1), 2);
  const Operation copy_in{.kind = OpKind::kCopyIn, .unit = 1};
  EXPECT_EQ(copy_bytes(copy_in, layout, DType::kFp32), 8 * layout.units[1].shard_elements);
  EXPECT_EQ(copy_bytes({.kind = OpKind::kForward, .unit = 1}, layout, DType::kFp32), 0);
  const Layout whole = make_layout(make_units(1), 1);
  EXPECT_EQ(copy_bytes({.kind = OpKind::kCopyOut, .unit = 1}, whole, DType::kFp32),
            8 * whole.units[1].padded_elements);
  for (const Layout* each : {&layout, &whole}) {
    const auto casts = [&](DType type) {
      const Fsdp2 step = build_fsdp2(*each, {.parameter_type = type});
      return std::ranges::count_if(step.buffers,
                                   [](const BufferSpec& b) { return b.name.ends_with("cast"); });
    };
    EXPECT_EQ(casts(DType::kFp32), 0);
    EXPECT_EQ(casts(DType::kBf16), 3);
  }
}

// Bytes alive while each operation of a step runs.
class Live {
 public:
  Live(const Fsdp2& step, const Layout& layout) : step_(step), plan_(live_memory(step, layout)) {}

  const MemoryPlan& plan() const { return plan_; }
  /// At the `which`-th operation of a kind and unit, for the purposes given.
  int64_t at(OpKind kind, int unit, int which, std::initializer_list<Purpose> purposes) const {
    const int index = find(kind, unit, which);
    int64_t bytes = 0;
    for (const Placement& p : plan_.placements)
      if (p.first <= index && index <= p.last && std::ranges::find(purposes, p.purpose) != purposes.end())
        bytes += p.bytes;
    return bytes;
  }
  int64_t at(OpKind kind, int unit, int which = 0) const {
    return at(kind, unit, which,
              {Purpose::kParameters, Purpose::kGradients, Purpose::kMoments, Purpose::kWeightSlots,
               Purpose::kGradientSlots, Purpose::kActivations, Purpose::kScratch, Purpose::kInputs,
               Purpose::kWorkspace});
  }

 private:
  int find(OpKind kind, int unit, int which) const {
    const auto& operations = step_.schedule.operations;
    for (size_t i = 0; i < operations.size(); ++i)
      if (operations[i].kind == kind && operations[i].unit == unit && which-- == 0)
        return static_cast<int>(i);
    ADD_FAILURE() << "no such operation";
    return 0;
  }

  const Fsdp2& step_;
  MemoryPlan plan_;
};

TEST(Fsdp2Memory, WeightsAliveInTheForwardPass) {
  const Layout layout = reference_layout(8);
  const Fsdp2 step = build_fsdp2(layout, reference_options());
  const Live live(step, layout);
  const int64_t root = 2 * kRootElements, block = 2 * kBlockElements, cast = block / 8;
  const auto weights = [&](OpKind kind, int unit) { return live.at(kind, unit, 0, {Purpose::kWeightSlots}); };
  for (int unit = 1; unit <= kBlocks; ++unit) {
    SCOPED_TRACE(unit);
    EXPECT_EQ(weights(OpKind::kForward, unit), root + 2 * block) << "one gathered buffer, one unsharded unit";
    const int64_t held = unit == 1 ? root : block;
    EXPECT_EQ(weights(OpKind::kCopyIn, unit), root + held + block + cast) << "two gathered buffers";
  }
  EXPECT_EQ(weights(OpKind::kHeadLoss, kHead), root);
}

TEST(Fsdp2Memory, WithoutShardingNothingIsGatheredOrPrefetched) {
  const Layout layout = reference_layout(1);
  const Fsdp2 step = build_fsdp2(layout, reference_options());
  for (const Operation& operation : step.schedule.operations) {
    EXPECT_NE(operation.kind, OpKind::kCopyIn);
    EXPECT_NE(operation.kind, OpKind::kGather);
  }
  const Live live(step, layout);
  const int64_t root = 2 * kRootElements, block = 2 * kBlockElements, cast = 2 * 4 * kDim * kDim;
  for (int which : {0, 1})
    EXPECT_EQ(live.at(OpKind::kCopyOut, 5, which, {Purpose::kWeightSlots}), root + block + cast);
  EXPECT_EQ(live.plan().peak_bytes(Purpose::kWeightSlots), root + block + cast) << "396.4 MB";
  EXPECT_EQ(live.at(OpKind::kForward, 5, 0, {Purpose::kWeightSlots}), root + block);
}

TEST(Fsdp2Memory, WeightsAndGradientsAliveInTheBackwardPass) {
  const Layout layout = reference_layout(8);
  const Fsdp2 step = build_fsdp2(layout, reference_options());
  const Live live(step, layout);
  const int64_t root = 2 * kRootElements, head_gradient = kRootElements;
  const auto transient = [&](OpKind kind, int unit) {
    return live.at(kind, unit, 0, {Purpose::kWeightSlots, Purpose::kGradientSlots}) - root - head_gradient;
  };
  EXPECT_EQ(transient(OpKind::kBackward, kBlocks), (2 + 2) * kBlockElements) << "no reduction yet";
  for (int unit = kBlocks - 1; unit > 1; --unit)
    EXPECT_EQ(transient(OpKind::kBackward, unit), (2 + 2 + 4) * kBlockElements) << unit;
  EXPECT_EQ(transient(OpKind::kBackward, 1), (2 + 4) * kBlockElements) << "nothing left to gather";
  EXPECT_EQ(transient(OpKind::kReduceCopyIn, 5), (2 + 2 + 4) * kBlockElements) << "weights dropped first";
  EXPECT_EQ(live.at(OpKind::kReduceCopyIn, 0, 0, {Purpose::kWeightSlots, Purpose::kGradientSlots}),
            (2 + 4) * kRootElements)
      << "root: weights dropped, gradients, input";
}

TEST(Fsdp2Memory, MemoryAtThePlacesThatMatter) {
  const Layout layout = reference_layout(8);
  const Fsdp2 step = build_fsdp2(layout, reference_options());
  const Live live(step, layout);
  const int64_t inputs = kInputBytes, root = 2 * kRootElements;
  const int64_t static_bytes = 12 * kElements / 8, gradients = 4 * kElements / 8;
  const int64_t activations = (kBlocks * 16 + 1) * kActivation;
  EXPECT_EQ(live.at(OpKind::kHeadLoss, kHead),
            static_bytes + inputs + root + activations + 3 * kRows * 32000 * 2);
  EXPECT_EQ(live.plan().bytes, live.at(OpKind::kHeadLoss, kHead));
  EXPECT_EQ(live.plan().peak_operation, "loss head");
  EXPECT_EQ(live.at(OpKind::kForward, 1),
            static_bytes + inputs + root + 4 * kBlockElements + (1 + 15 + 1 + 1) * kActivation)
      << "input, saved, output, extra";
  // The last block's backward pass: the head's input is no more, but its gradient is.
  EXPECT_EQ(live.at(OpKind::kBackward, kBlocks), static_bytes + inputs + root + kRootElements + activations +
                                                     5 * kActivation + 4 * kBlockElements);
  EXPECT_EQ(live.at(OpKind::kReduceScatter, kHead), static_bytes + gradients + 4 * kRootElements);
  EXPECT_EQ(live.at(OpKind::kUpdate, 0), static_bytes + gradients);
}

TEST(Fsdp2Memory, LaterMicroBatchesAddReducedPiecesToGradientsThatStay) {
  const Layout layout = reference_layout(8);
  Fsdp2Options options = reference_options();
  const int64_t one = live_memory(build_fsdp2(layout, options), layout).bytes;
  options.micro_batches = 2;
  const Fsdp2 step = build_fsdp2(layout, options);
  EXPECT_EQ(live_memory(step, layout).bytes, one + 4 * kElements / 8 + kInputBytes);
  const Live live(step, layout);
  EXPECT_EQ(live.at(OpKind::kAccumulate, 3, 0, {Purpose::kGradients}), 4 * kElements / 8);
  for (const Operation& operation : step.schedule.operations)
    if (operation.accumulate) {
      EXPECT_EQ(operation.kind, OpKind::kAccumulate);
      for (const Region& region : operation.writes)
        EXPECT_EQ(std::ranges::count(operation.reads, region), 1) << "added to what is there";
    }
}

}  // namespace
}  // namespace minillm::shard
