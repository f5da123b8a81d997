#include "shard/executor.h"

#include <gtest/gtest.h>

#include <set>

#include "core/error.h"
#include "fixtures.h"
#include "ranks.h"
#include "toy.h"
#include "toy_policies.h"

namespace minillm::shard {
namespace {

constexpr int kSteps = 4;

ToyResult run(const Layout& layout, const NamedPolicy& named, Launch launch, int restart_at = -1) {
  const OwnedCommunicators communicators(named.shards);
  return run_toy(layout,
                 {named.policy, named.type, kSteps, ranks().rank(), communicators.get(), launch, restart_at});
}

TEST(Executor, EqualsPlainLoops) {
  for (const NamedPolicy& named : toy_policies(ranks().size()))
    for (Launch launch : {Launch::kEager, Launch::kGraph}) {
      SCOPED_TRACE(named.name + (launch == Launch::kGraph ? ", as a graph" : ""));
      const Layout layout = layout_of(named);
      EXPECT_EQ(run(layout, named, launch), toy_reference(layout, named.policy, ranks().rank(), kSteps));
    }
}

TEST(Executor, EqualsPlainLoopsForSmallModels) {
  for (int blocks : {0, 1, 2}) {
    const Layout layout = toy_layout(ranks().size(), blocks);
    const NamedPolicy named{"", ranks().size(), {.deferred_blocks = 2}};
    EXPECT_EQ(run(layout, named, Launch::kEager), toy_reference(layout, named.policy, ranks().rank(), kSteps))
        << blocks << " blocks";
  }
}

// Weights that were gathered for the next step are not those that it finds.
TEST(Executor, GathersAgainWhatSomebodyElseChanged) {
  const Layout layout = toy_layout(ranks().size());
  const NamedPolicy named{"", ranks().size(), {.deferred_blocks = 1}};
  const ToyResult expected = toy_reference(layout, named.policy, ranks().rank(), kSteps, 2);
  EXPECT_NE(expected, toy_reference(layout, named.policy, ranks().rank(), kSteps));
  for (Launch launch : {Launch::kEager, Launch::kGraph}) EXPECT_EQ(run(layout, named, launch, 2), expected);
}

// Units of one segment lie alike in every layout, so what a step computes does not depend on who has which
// part of the model.
TEST(Executor, AllWaysToShareAModelAgree) {
  std::set<std::vector<ToyRecord>> histories;
  for (int shards = 1; shards <= ranks().size(); ++shards)
    if (ranks().size() % shards == 0)
      histories.insert(run(make_layout(make_units(3, kToyDim), shards),
                           {"", shards, {.replicas = ranks().size() / shards}}, Launch::kEager)
                           .history);
  EXPECT_EQ(histories.size(), 1u);
}

// The toy and its reference are only worth something if results depend on what happens.
TEST(Executor, ToyResultsDependOnEveryStep) {
  const Layout layout = toy_layout(1, 3);
  const ToyResult three = toy_reference(layout, {}, 0, 3), four = toy_reference(layout, {}, 0, 4);
  for (size_t u = 0; u < layout.units.size(); ++u) EXPECT_NE(three.masters[u], four.masters[u]) << u;
  for (size_t a = 0; a < four.history.size(); ++a)
    for (size_t b = 0; b < a; ++b) EXPECT_NE(four.history[a], four.history[b]);
  EXPECT_NE(toy_reference(layout, {.micro_batches = 2}, 0, 3), three);
  EXPECT_NE(toy_reference(layout, {.clip = true}, 0, 3), three);
  EXPECT_NE(toy_reference(layout, {.replicas = 2}, 0, 3), three);
}

TEST(Executor, BytesOnTheWireAreThoseOfTheSchedule) {
  if (ranks().size() == 1) GTEST_SKIP() << "nothing is sent by a single rank";
  const OwnedCommunicators communicators(ranks().size());
  const Layout layout = toy_layout(ranks().size());
  run_toy(layout, {{.deferred_blocks = 1}, DType::kBf16, 2, ranks().rank(), communicators.get()});
  const comm::Traffic& gather = communicators.get().gather->traffic();
  const comm::Traffic& reduce = communicators.get().reduce->traffic();
  // Blocks have two segments, and all but two are gathered again for their backward passes. The embedding and
  // the first two blocks are gathered ahead of the first step and in each for the next.
  const int per_step = 2 + 2 * (kToyBlocks + kToyBlocks - 2);
  EXPECT_EQ(gather.all_gather_calls, 2 * per_step + 1 + 2 * 2);
  EXPECT_EQ(reduce.reduce_scatter_calls, 2 * (2 * kToyBlocks + 2));
  EXPECT_EQ(reduce.all_reduce_calls, 2 * 3);
  EXPECT_EQ(reduce.reduce_scatter_bytes, 2 * 4 * (ranks().size() - 1) * layout.shard_elements());
}

// Operands of one step, as a program sees them.
class RecordingProgram : public Program {
 public:
  struct Call {
    Operation operation;
    Operands operands;
    const std::byte* saved;  // the buffer; Operands::buffers ends with the executor
    cudaStream_t stream;
  };
  std::vector<BufferSpec> specs = {{"tokens", 100, Purpose::kInputs}, {"saved", 300, Purpose::kActivations}};
  std::vector<Call> calls;

  const std::vector<BufferSpec>& buffers() const override { return specs; }
  BufferUse uses(const Operation& operation) const override {
    if (operation.kind == OpKind::kUpload) return {{}, {0}};
    return operation.kind == OpKind::kForward ? BufferUse{{0}, {1}} : BufferUse{{0}, {}};
  }
  void compute(const Operation& operation, const Operands& operands, cudaStream_t stream) override {
    calls.push_back({operation, operands, operands.buffers[1], stream});
  }
  std::vector<KernelWork> work(const Operation&) const override { return {}; }
};

class GivenOperands : public testing::Test {
 protected:
  // Runs one step on this rank alone.
  void run(const Policy& policy) {
    schedule_ = build_schedule(layout_, program_, policy);
    const auto waits = derive_waits(schedule_);
    plan_ = plan_memory(schedule_, waits, layout_, program_, DType::kBf16);
    arena_ = cuda::DeviceMemory(plan_.bytes);
    Executor executor(schedule_, layout_, plan_, waits, program_, {}, arena_.data(), DType::kBf16);
    const int64_t allocated = cuda::device_bytes_peak();
    executor.step();
    executor.synchronize();
    EXPECT_EQ(cuda::device_bytes_peak(), allocated);
    ASSERT_EQ(program_.calls.size(), schedule_.operations.size());
    for (const RecordingProgram::Call& call : program_.calls)
      EXPECT_EQ(call.stream, executor.stream(call.operation.stream));
  }

  void expect_at(const void* found, bool wanted, int64_t offset) const {
    EXPECT_EQ(found, wanted ? arena_.data() + offset : nullptr);
  }

  void expect_of_unit(const Operation& operation, const Operands& given) const {
    const OpKind kind = operation.kind;
    const auto u = static_cast<size_t>(std::max(operation.unit, 0));
    const bool update = kind == OpKind::kUpdate;
    const bool weights = kind == OpKind::kForward || kind == OpKind::kHeadLoss ||
                         (kind == OpKind::kBackward && u > 0) || kind == OpKind::kBackwardInput ||
                         kind == OpKind::kBackwardWeight;
    const int64_t slot = operation.shard_slot < 0 ? 0 : plan_.shard_slot[operation.shard_slot];
    expect_at(given.weights, weights, plan_.parameter_shard[u]);
    const bool none = kind == OpKind::kBackwardInput && operation.unit + 1 == std::ssize(layout_.units);
    expect_at(given.gradients, makes_gradients(kind) && !none, slot);
    expect_at(given.gradient_shard, update || kind == OpKind::kSquareNorm, slot);
    expect_at(given.parameter_shard, update, plan_.parameter_shard[u]);
    expect_at(given.lower_half, update, plan_.lower_half[u]);
    expect_at(given.moment1, update, plan_.moment1[u]);
    expect_at(given.moment2, update, plan_.moment2[u]);
  }

  void expect_scalars(const Operation& operation, const Operands& given, bool clip) const {
    const OpKind kind = operation.kind;
    const bool read_back = kind == OpKind::kReadBack, update = kind == OpKind::kUpdate;
    const bool loss = kind == OpKind::kHeadLoss, collect = kind == OpKind::kCollectLoss;
    expect_at(given.valid_count, kind == OpKind::kBegin || loss || collect, plan_.valid_count);
    expect_at(given.loss_sum, loss || collect, plan_.loss_sum + 4 * operation.micro_batch);
    expect_at(given.loss_total, collect || kind == OpKind::kGate || read_back, plan_.loss_total);
    expect_at(given.gate, kind == OpKind::kGate || (!clip && (update || read_back)), plan_.gate);
    expect_at(given.norm_partials, kind == OpKind::kSquareNorm || kind == OpKind::kCollectNorm,
              plan_.norm_partials);
    expect_at(given.norm_total, kind == OpKind::kCollectNorm || kind == OpKind::kClip, plan_.norm_total);
    expect_at(given.clip, kind == OpKind::kClip || read_back || (clip && update), plan_.clip);
  }

  RecordingProgram program_;
  Layout layout_ = make_layout(make_segmented_units(2), 1);
  Schedule schedule_;
  MemoryPlan plan_;
  cuda::DeviceMemory arena_;
};

TEST_F(GivenOperands, AreThoseOfThePlanAndNoOthers) {
  if (ranks().size() > 1) GTEST_SKIP() << "needs no ranks";
  for (bool clip : {false, true}) {
    program_.calls.clear();
    run({.deferred_blocks = 1, .split_head = clip, .micro_batches = 2, .clip = clip});
    for (const RecordingProgram::Call& call : program_.calls) {
      SCOPED_TRACE(describe(call.operation, {}));
      EXPECT_EQ(call.saved, arena_.data() + plan_.buffer[1]);
      EXPECT_EQ(call.operands.wire, nullptr);
      EXPECT_EQ(call.operands.reduced_piece, nullptr);
      expect_of_unit(call.operation, call.operands);
      expect_scalars(call.operation, call.operands, clip);
    }
  }
}

TEST(Executor, RefusesWhatItCannotRun) {
  RecordingProgram program;
  const Layout layout = make_layout(make_units(1), 1), four = make_layout(make_units(1), 4);
  const Schedule schedule = build_schedule(layout, program, {}), sharded = build_schedule(four, program, {});
  const Schedule replicated = build_schedule(layout, program, {.replicas = 4});
  const auto waits = derive_waits(schedule);
  const MemoryPlan plan = plan_memory(schedule, waits, layout, program, DType::kBf16);
  const cuda::DeviceMemory arena(plan.bytes);
  const auto make = [&](const Schedule& with, std::vector<std::vector<Wait>> given) {
    Executor executor(with, layout, plan, std::move(given), program, {}, arena.data(), DType::kBf16);
  };
  EXPECT_NO_THROW(make(schedule, waits));
  auto future = waits;
  future[1].push_back({2, 0});
  EXPECT_THROW(make(schedule, future), InternalError);
  auto unknown = waits;
  unknown[1].push_back({static_cast<int>(waits.size()), 1});
  EXPECT_THROW(make(schedule, unknown), InternalError);
  auto distant = waits;
  distant[1].push_back({0, 2});
  EXPECT_THROW(make(schedule, distant), InternalError);
  EXPECT_THROW(make(schedule, {}), InternalError);
  EXPECT_THROW(make(sharded, derive_waits(sharded)), InternalError) << "four ranks without communicators";
  EXPECT_THROW(make(replicated, derive_waits(replicated)), InternalError) << "four replicas without one";
}

}  // namespace
}  // namespace minillm::shard
