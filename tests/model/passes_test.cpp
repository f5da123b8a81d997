// The passes in all their forms compute the same: split or fused backward pass, every kind of recomputation,
// micro-batches added up or apart.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/error.h"
#include "model/parameters.h"
#include "tests/model/model_rig.h"
#include "tests/unit/errors.h"

namespace minillm::model::test {
namespace {

using minillm::test::expect_error;
using shard::OpKind;

constexpr float kValidCount = 30;

std::string describe(const Variant& variant) {
  std::string text(name_of(variant.dtype));
  text.append(variant.rope_and_final_norm ? ", RoPE and final norm" : "");
  text.append(variant.head_chunk < kRows ? ", logits in chunks" : ", all logits").append(", recompute");
  for (const Recompute recompute : variant.recomputation.blocks)
    text.append(" ").append(std::to_string(static_cast<int>(recompute)));
  return text;
}

/// bf16 and fp32, with and without the model's optional parts, with logits in chunks and all at once; under a
/// sanitizer the two that differ most.
std::vector<Variant> variants() {
  std::vector<Variant> all;
  for (const DType dtype : {DType::kBf16, DType::kFp32})
    for (const bool parts : {true, false})
      for (const int64_t head_chunk : {kHeadChunk, kRows})
        if (!kSanitized || (parts == (dtype == DType::kBf16) && head_chunk == kRows))
          all.push_back({.dtype = dtype, .rope_and_final_norm = parts, .head_chunk = head_chunk});
  return all;
}

const std::vector<std::vector<Recompute>>& recomputations() {
  static const std::vector<std::vector<Recompute>> all = {{Recompute::kCheap, Recompute::kCheap},
                                                          {Recompute::kNone, Recompute::kNone},
                                                          {Recompute::kBlock, Recompute::kBlock},
                                                          {Recompute::kBlock, Recompute::kNone}};
  return all;
}

/// What a step leaves for others.
struct Result {
  std::vector<Bytes> gradients;
  Bytes residual, loss_sums;
};

Result result_of(const Variant& variant, bool split) {
  ModelRig rig(variant, kValidCount);
  run_all(rig, micro_batch(rig, split));
  State state = rig.save();
  return {std::move(state.gradients),
          std::move(state.buffers[static_cast<size_t>(rig.buffer("residual gradient"))]),
          std::move(state.loss_sums)};
}

void expect_equal(const Result& a, const Result& b) {
  for (size_t unit = 0; unit < a.gradients.size(); ++unit)
    EXPECT_EQ(a.gradients[unit], b.gradients[unit]) << "unit " << unit;
  EXPECT_EQ(a.residual, b.residual);
  EXPECT_EQ(a.loss_sums, b.loss_sums);
}

/// Every element of every tensor finite, not all of them 0, and the padding 0.
void expect_complete(const ModelRig& rig) {
  for (int unit = 0; unit < std::ssize(rig.layout().units); ++unit) {
    const shard::UnitLayout& layout = rig.layout().units[static_cast<size_t>(unit)];
    std::vector<float> values = rig.gradients(unit);
    for (const shard::Slice& slice : layout.slices) {
      const auto begin = values.begin() + slice.offset, end = begin + slice.elements;
      EXPECT_TRUE(std::all_of(begin, end, [](float x) { return std::isfinite(x); })) << slice.name;
      EXPECT_TRUE(std::any_of(begin, end, [](float x) { return x != 0; })) << slice.name;
      std::fill(begin, end, 0.0f);
    }
    EXPECT_TRUE(std::ranges::all_of(values, [](float x) { return x == 0; })) << layout.name << "'s padding";
  }
}

TEST(Passes, MakeAllGradients) {
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(describe(variant));
    ModelRig rig(variant, kValidCount);
    run_all(rig, micro_batch(rig, /*split=*/false));
    expect_complete(rig);
    const float loss = rig.loss_sums()[0];
    EXPECT_TRUE(loss > 0 && std::isfinite(loss)) << loss;
  }
}

TEST(Passes, SplitBackwardIsFusedBackwardBitForBit) {
  for (Variant variant : variants()) {
    for (const std::vector<Recompute>& recompute : recomputations()) {
      variant.recomputation = {.blocks = recompute, .deferred_blocks = 2};
      SCOPED_TRACE(describe(variant));
      expect_equal(result_of(variant, /*split=*/true), result_of(variant, /*split=*/false));
    }
  }
}

TEST(Passes, AllSegmentsAtOnceAreTheSegmentsOneByOne) {
  const Variant variant;
  ModelRig rig(variant, kValidCount);
  std::vector<shard::Operation> operations = micro_batch(rig, /*split=*/true);
  std::erase_if(operations, [](const shard::Operation& operation) {
    return operation.kind == OpKind::kBackwardWeight && operation.segment != kFeedForward;
  });
  for (shard::Operation& operation : operations)
    if (operation.kind == OpKind::kBackwardWeight) operation.segment = -1;
  run_all(rig, operations);
  EXPECT_EQ(rig.save().gradients, result_of(variant, /*split=*/true).gradients);
}

TEST(Passes, EveryRecomputationGivesTheSameBits) {
  for (Variant variant : variants()) {
    const Result cheap = result_of(variant, /*split=*/false);
    for (const std::vector<Recompute>& recompute : recomputations()) {
      variant.recomputation = {.blocks = recompute};
      SCOPED_TRACE(describe(variant));
      expect_equal(result_of(variant, /*split=*/false), cheap);
    }
  }
}

TEST(Passes, LogitsOfARowDoNotDependOnWhatIsKept) {
  for (Variant variant : variants()) {
    SCOPED_TRACE(describe(variant));
    std::vector<std::vector<Bytes>> logits;
    for (const std::vector<Recompute>& recompute : recomputations()) {
      variant.recomputation = {.blocks = recompute};
      ModelRig rig(variant, kValidCount);
      for (int unit = 0; unit < rig.transformer().head_unit(); ++unit)
        rig.run({.kind = OpKind::kForward, .unit = unit});
      logits.push_back({rig.logits_of(0), rig.logits_of(kRows - 1)});
      EXPECT_NE(logits.back()[0], logits.back()[1]);
      EXPECT_EQ(logits.back(), logits.front());
    }
  }
}

/// Bytes of activations that blocks keep, by the operations' declarations: what is read later than the
/// block's forward pass, and scratch of no operation.
int64_t kept_bytes(const std::vector<Recompute>& recompute) {
  const ModelRig rig({.recomputation = {.blocks = recompute}}, kValidCount);
  std::vector<bool> kept(rig.transformer().buffers().size(), false);
  for (const shard::Operation& operation : micro_batch(rig, /*split=*/false)) {
    if (operation.kind != OpKind::kForward && operation.kind != OpKind::kBackward) continue;
    for (const int buffer : rig.transformer().uses(operation).reads) kept[static_cast<size_t>(buffer)] = true;
  }
  int64_t bytes = 0;
  for (size_t i = 0; i < kept.size(); ++i)
    if (kept[i] && rig.transformer().buffers()[i].purpose == shard::Purpose::kActivations)
      bytes += rig.transformer().buffers()[i].bytes;
  return bytes;
}

TEST(Passes, RecomputationTradesMemory) {
  using enum Recompute;
  const config::Model model = small_model(true);
  const int64_t a = kRows * model.dim * size_of(DType::kBf16);
  const int64_t f = kRows * model.ffn_dim * size_of(DType::kBf16);
  const int64_t statistics = kRows * (2 + model.n_heads) * int64_t{sizeof(float)};
  const int64_t block = 5 * a + f + statistics;
  EXPECT_EQ(kept_bytes({kNone, kNone}) - kept_bytes({kCheap, kCheap}), 2 * (2 * a + f));
  EXPECT_EQ(kept_bytes({kCheap, kCheap}) - kept_bytes({kBlock, kBlock}), block) << "one block at a time";
}

/// What two micro-batches of one step give, and each of them alone.
struct MicroBatches {
  ModelRig together, first, second;

  MicroBatches(Variant variant, bool split, bool second_is_ignored = false)
      : together(with(variant, 2, 0, second_is_ignored), kValidCount),
        first(with(variant, 1, 0, second_is_ignored), kValidCount),
        second(with(variant, 1, 1, second_is_ignored), kValidCount) {
    run_all(together, micro_batch(together, /*split=*/false, 0));
    run_all(together, micro_batch(together, split, 1, /*accumulate=*/true));
    run_all(first, micro_batch(first, split));
    run_all(second, micro_batch(second, split));
  }

 private:
  static Variant with(Variant variant, int64_t micro_batches, int64_t first, bool second_is_ignored) {
    variant.micro_batches = micro_batches;
    variant.first_micro_batch = first;
    variant.ignored_micro_batch = second_is_ignored ? 1 : -1;
    return variant;
  }
};

float largest(const std::vector<float>& values) {
  float most = 0;
  for (const float value : values) most = std::max(most, std::fabs(value));
  return most;
}

/// Kernels add a finished sum: one rounding. Products add to what is there term by term or at the end: one
/// rounding for each of kRows terms and chunks, each of at most half a unit of a partial sum, which here
/// stays below four times the largest gradient of the tensor.
void expect_sum(const shard::Slice& slice, const std::vector<float>& sum, const std::vector<float>& a,
                const std::vector<float>& b) {
  const bool product = slice.shape.size() == 2 && !slice.name.starts_with("embedding");
  const float allowed = product ? (kRows + 4) * 0x1p-24f * 4 * (largest(a) + largest(b)) : 0;
  for (size_t i = 0; i < sum.size(); ++i)
    ASSERT_LE(std::fabs(sum[i] - (a[i] + b[i])), allowed)
        << slice.name << "[" << i << "]: " << sum[i] << " is not " << a[i] << " + " << b[i];
}

TEST(Passes, MicroBatchesAddUp) {
  for (Variant variant : variants()) {
    for (const bool split : {false, true}) {
      variant.recomputation = {.blocks = {Recompute::kBlock, Recompute::kCheap}, .deferred_blocks = 2};
      SCOPED_TRACE(describe(variant) + (split ? ", split" : ""));
      const MicroBatches run(variant, split);
      for (int unit = 0; unit < std::ssize(run.first.layout().units); ++unit)
        for (const shard::Slice& slice : run.first.layout().units[static_cast<size_t>(unit)].slices)
          expect_sum(slice, run.together.gradient(unit, slice.name), run.first.gradient(unit, slice.name),
                     run.second.gradient(unit, slice.name));
      EXPECT_NE(run.first.loss_sums(), run.second.loss_sums());
      EXPECT_EQ(run.together.loss_sums(), (std::vector{run.first.loss_sums()[0], run.second.loss_sums()[0]}));
      expect_complete(run.together);
    }
  }
}

TEST(Passes, AMicroBatchThatDoesNotCountAddsNothing) {
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(describe(variant));
    const MicroBatches run(variant, /*split=*/true, /*second_is_ignored=*/true);
    for (int unit = 0; unit < std::ssize(run.first.layout().units); ++unit)
      EXPECT_EQ(run.together.gradients(unit), run.first.gradients(unit)) << "unit " << unit;
    EXPECT_EQ(run.together.loss_sums(), (std::vector{run.first.loss_sums()[0], 0.0f}));
  }
}

TEST(Passes, OtherOperationsAreRefused) {
  const ModelRig rig(
      {.recomputation = {.blocks = {Recompute::kBlock, Recompute::kBlock}, .deferred_blocks = 1}},
      kValidCount);
  const auto refuses = [&](const shard::Operation& operation, const std::string& name) {
    expect_error<InternalError>([&] { rig.transformer().uses(operation); }, {"Transformer", name});
    expect_error<InternalError>([&] { rig.transformer().work(operation); }, {"Transformer", name});
  };
  rig.transformer().uses({.kind = OpKind::kBackwardInput, .unit = 1});
  refuses({.kind = OpKind::kBackwardInput, .unit = 2}, "backward input block1");
  refuses({.kind = OpKind::kBackwardWeight, .unit = 2}, "backward weight block1");
  refuses({.kind = OpKind::kBackwardWeight, .unit = 1, .segment = 3}, "segment 3");
  refuses({.kind = OpKind::kBackwardInput, .unit = 0}, "backward input embedding");
  refuses({.kind = OpKind::kForward, .unit = 3}, "forward head");
  refuses({.kind = OpKind::kHeadLoss, .unit = 3, .segment = kProjection}, "loss head segment 1");
  refuses({.kind = OpKind::kBackwardInput, .unit = 3, .segment = kFinalNorm}, "backward input head");
  const ModelRig one_chunk({.head_chunk = kRows}, kValidCount);
  one_chunk.transformer().uses({.kind = OpKind::kHeadLoss, .unit = 3, .segment = kProjection});
  expect_error<InternalError>(
      [&] { one_chunk.transformer().uses({.kind = OpKind::kHeadLoss, .unit = 3, .segment = kFinalNorm}); },
      {"loss head segment 0"});
  expect_error<InternalError>(
      [&] {
        one_chunk.transformer().uses({.kind = OpKind::kBackwardInput, .unit = 3, .segment = kProjection});
      },
      {"backward input head segment 1"});
  refuses({.kind = OpKind::kForward, .unit = -1}, "forward");
  refuses({.kind = OpKind::kUpdate, .unit = 1}, "update block0");
  refuses({.kind = OpKind::kForward, .unit = 1, .micro_batch = 1}, "micro-batch 1");
  const ModelRig cheap({}, kValidCount);
  expect_error<InternalError>([&] { cheap.transformer().uses({.kind = OpKind::kRecompute, .unit = 1}); },
                              {"recompute block0"});
  expect_error<InternalError>(
      [] { ModelRig({.recomputation = {.blocks = {Recompute::kNone}}}, kValidCount); },
      {"1 blocks", "has 2"});
}

}  // namespace
}  // namespace minillm::model::test
