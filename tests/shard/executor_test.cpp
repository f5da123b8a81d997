#include "shard/executor.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "fixtures.h"
#include "ranks.h"
#include "toy.h"

namespace minillm::shard {
namespace {

Layout toy_layout(int blocks, int64_t dim) {
  return make_layout(make_units(blocks, dim), ranks().size());
}

TEST(Executor, EqualsPlainLoops) {
  const OwnedCommunicators communicators;
  for (DType type : {DType::kBf16, DType::kFp32})
    for (int blocks : {0, 1, 5})
      for (int slots : {2, 3}) {
        SCOPED_TRACE(std::string(name_of(type)) + ", blocks " + std::to_string(blocks) + ", slots " +
                     std::to_string(slots));
        // Dimensions of slices that leave gaps between them, so that padding is there to be wrong.
        const Layout layout = toy_layout(blocks, 19);
        const ToyResult result =
            run_toy(layout, {{slots, slots - 1}, type, 4, ranks().rank(), communicators.get()});
        EXPECT_EQ(result, toy_reference(layout, ranks().rank(), 4));
      }
}

// The toy and its reference are only worth something if results depend on what happens.
TEST(Executor, ToyResultsDependOnEveryStep) {
  const Layout layout = toy_layout(3, 19);
  const ToyResult three = toy_reference(layout, 0, 3), four = toy_reference(layout, 0, 4);
  for (size_t u = 0; u < layout.units.size(); ++u) EXPECT_NE(three.masters[u], four.masters[u]) << u;
  for (size_t a = 0; a < four.history.size(); ++a)
    for (size_t b = 0; b < a; ++b) EXPECT_NE(four.history[a], four.history[b]);
}

TEST(Executor, BytesOnTheWireAreThoseOfTheSchedule) {
  if (ranks().size() == 1) GTEST_SKIP() << "nothing is sent by a single rank";
  const OwnedCommunicators communicators;
  const Layout layout = toy_layout(5, 19);
  run_toy(layout, {{2, 2}, DType::kBf16, 2, ranks().rank(), communicators.get()});
  const comm::Traffic& gather = communicators.gather->traffic();
  const comm::Traffic& reduce = communicators.reduce->traffic();
  EXPECT_EQ(gather.all_gather_calls, 2 * (5 + 3 + 2));
  EXPECT_EQ(reduce.reduce_scatter_calls, 2 * 7);
  EXPECT_EQ(reduce.all_reduce_calls, 2 * 2);
  EXPECT_EQ(reduce.reduce_scatter_bytes, 2 * 4 * (ranks().size() - 1) * layout.shard_elements());
}

// Operands of one step, as a program sees them.
class RecordingProgram : public Program {
 public:
  struct Call {
    Operation operation;
    Operands operands;
    cudaStream_t stream;
  };
  std::vector<BufferSpec> specs = {{"tokens", 100, Purpose::kInputs}, {"saved", 300, Purpose::kActivations}};
  std::vector<Call> calls;

  const std::vector<BufferSpec>& buffers() const override { return specs; }
  BufferUse uses(OpKind kind, int) const override {
    return kind == OpKind::kBegin ? BufferUse{{}, {0}} : BufferUse{{0}, {1}};
  }
  void compute(const Operation& operation, const Operands& operands, cudaStream_t stream) override {
    calls.push_back({operation, operands, stream});
  }
};

TEST(Executor, GivesTheAddressesOfThePlanAndNoOthers) {
  if (ranks().size() > 1) GTEST_SKIP() << "needs no ranks";
  RecordingProgram program;
  const Layout layout = make_layout(make_units(1), 1);
  const Schedule schedule = build_schedule(layout, program, {});
  const MemoryPlan plan = plan_memory(schedule, layout, program, DType::kBf16);
  const cuda::DeviceMemory arena(plan.bytes);
  Executor executor(schedule, layout, plan, derive_waits(schedule), program, {}, arena.data(), DType::kBf16);
  const int64_t allocated = cuda::device_bytes_peak();
  executor.step();
  executor.synchronize();
  EXPECT_EQ(cuda::device_bytes_peak(), allocated);

  ASSERT_EQ(program.calls.size(), schedule.operations.size());
  const auto at = [&](int64_t offset) { return arena.data() + offset; };
  const auto bytes = [](const void* pointer) { return static_cast<const std::byte*>(pointer); };
  for (const RecordingProgram::Call& call : program.calls) {
    SCOPED_TRACE(describe(call.operation, {}));
    const Operands& given = call.operands;
    const OpKind kind = call.operation.kind;
    const int unit = call.operation.unit;
    EXPECT_EQ(call.stream, executor.stream(call.operation.stream));
    EXPECT_EQ(given.buffers[1], at(plan.buffer[1]));
    const auto expect = [&](const void* found, bool wanted, int64_t offset) {
      EXPECT_EQ(bytes(found), wanted ? at(offset) : nullptr);
    };
    const bool update = kind == OpKind::kUpdate;
    const bool stats = kind == OpKind::kCollectStats || kind == OpKind::kClip || kind == OpKind::kReadBack;
    const auto of_unit = [&](const std::vector<int64_t>& offsets) { return unit < 0 ? 0 : offsets[unit]; };
    expect(given.weights,
           kind == OpKind::kForward || kind == OpKind::kHeadLoss || (kind == OpKind::kBackward && unit > 0),
           of_unit(plan.parameter_shard));
    expect(given.gradients, kind == OpKind::kHeadLoss || kind == OpKind::kBackward,
           of_unit(plan.gradient_shard));
    expect(given.gradient_shard, update || kind == OpKind::kSquareNorm, of_unit(plan.gradient_shard));
    expect(given.parameter_shard, update, of_unit(plan.parameter_shard));
    expect(given.master, update, of_unit(plan.master));
    expect(given.moment1, update, of_unit(plan.moment1));
    expect(given.moment2, update, of_unit(plan.moment2));
    expect(given.valid_count,
           kind == OpKind::kBegin || kind == OpKind::kHeadLoss || kind == OpKind::kReadBack,
           plan.valid_count);
    expect(given.loss_sum, kind == OpKind::kHeadLoss || kind == OpKind::kCollectStats, plan.loss_sum);
    expect(given.norm_partials, kind == OpKind::kSquareNorm || kind == OpKind::kCollectStats,
           plan.norm_partials);
    expect(given.stats, stats, plan.stats);
    expect(given.clip, update || kind == OpKind::kClip || kind == OpKind::kReadBack, plan.clip);
  }
}

TEST(Executor, RefusesWhatItCannotRun) {
  RecordingProgram program;
  const Layout layout = make_layout(make_units(1), 1), four = make_layout(make_units(1), 4);
  const Schedule schedule = build_schedule(layout, program, {}), sharded = build_schedule(four, program, {});
  const MemoryPlan plan = plan_memory(schedule, layout, program, DType::kBf16);
  const cuda::DeviceMemory arena(plan.bytes);
  const auto make = [&](const Schedule& with, std::vector<std::vector<Wait>> waits) {
    Executor executor(with, layout, plan, std::move(waits), program, {}, arena.data(), DType::kBf16);
  };
  const auto waits = derive_waits(schedule);
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
}

}  // namespace
}  // namespace minillm::shard
