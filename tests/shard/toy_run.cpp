#include <bit>

#include "core/split_float.h"
#include "cuda/check.h"
#include "toy.h"

namespace minillm::shard {
namespace {

int shard_of(int rank, const Layout& layout) {
  return rank % layout.world;
}

std::vector<float> initial_shard(const Layout& layout, int unit_index, int rank) {
  const UnitLayout& unit = layout.units[unit_index];
  std::vector<float> master(static_cast<size_t>(unit.shard_elements));
  for (const Slice& slice : unit.slices) {
    const ShardPiece piece = shard_piece(unit, slice, shard_of(rank, layout));
    for (int64_t i = 0; i < piece.count; ++i)
      master[static_cast<size_t>(piece.shard_offset + i)] =
          toy_initial(unit_index, slice.offset + piece.tensor_offset + i);
  }
  return master;
}

// Returns when it is there.
void initialize(const Layout& layout, const ToyRun& run, std::byte* arena, const MemoryPlan& plan) {
  for (int u = 0; u < std::ssize(layout.units); ++u) {
    const std::vector<float> master = initial_shard(layout, u, run.rank);
    const size_t bytes = master.size() * sizeof(float);
    cuda::check(cudaMemset(arena + plan.moment1[u], 0, bytes));
    cuda::check(cudaMemset(arena + plan.moment2[u], 0, bytes));
    const auto put = [&](int64_t offset, const auto& values) {
      const size_t size = values.size() * sizeof(values.front());
      cuda::check(cudaMemcpy(arena + offset, values.data(), size, cudaMemcpyHostToDevice));
    };
    if (run.type == DType::kFp32) {
      put(plan.parameter_shard[u], master);
      continue;
    }
    std::vector<uint16_t> upper, lower;
    for (float value : master) {
      const SplitFloat halves = split_float(std::bit_cast<uint32_t>(value));
      upper.push_back(halves.upper);
      lower.push_back(halves.lower);
    }
    put(plan.parameter_shard[u], upper);
    put(plan.lower_half[u], lower);
  }
  cuda::check(cudaDeviceSynchronize());
}

template <class T = float>
std::vector<T> read(const std::byte* from, int64_t elements) {
  std::vector<T> values(static_cast<size_t>(elements));
  cuda::check(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

std::vector<float> read_masters(const std::byte* arena, const MemoryPlan& plan, int unit, int64_t elements) {
  if (plan.lower_half[unit] < 0) return read(arena + plan.parameter_shard[unit], elements);
  const auto upper = read<uint16_t>(arena + plan.parameter_shard[unit], elements);
  const auto lower = read<uint16_t>(arena + plan.lower_half[unit], elements);
  std::vector<float> values;
  for (size_t i = 0; i < upper.size(); ++i)
    values.push_back(std::bit_cast<float>(join_float({upper[i], lower[i]})));
  return values;
}

int shard_slot_of(int unit, const Schedule& schedule) {
  for (const Operation& operation : schedule.operations)
    if (operation.kind == OpKind::kUpdate && operation.unit == unit) return operation.shard_slot;
  return -1;
}

}  // namespace

ToyResult run_toy(const Layout& layout, const ToyRun& run, const std::vector<std::vector<Wait>>* waits) {
  ToyProgram program(layout, run.policy, run.rank, run.type, run.steps);
  const Schedule schedule = build_schedule(layout, program, run.policy);
  const std::vector<std::vector<Wait>> derived = derive_waits(schedule);
  const MemoryPlan plan = plan_memory(schedule, derived, layout, program, run.type);
  const cuda::DeviceMemory arena(plan.bytes);
  initialize(layout, run, arena.data(), plan);
  Executor executor(schedule, layout, plan, waits != nullptr ? *waits : derived, program, run.communicators,
                    arena.data(), run.type, run.launch);
  executor.set_observer(run.observer);
  for (int step = 0; step < run.steps; ++step) {
    if (run.before_step) run.before_step(step);
    if (step == run.restart_at) {
      executor.synchronize();
      initialize(layout, run, arena.data(), plan);
      executor.weights_changed();
    }
    executor.step();
  }
  executor.synchronize();

  ToyResult result{program.history(), {}, {}};
  for (int u = 0; u < std::ssize(layout.units); ++u) {
    const int64_t elements = layout.units[u].shard_elements;
    result.masters.push_back(read_masters(arena.data(), plan, u, elements));
    if (run.policy.keep_gradients)
      result.gradients.push_back(read(arena.data() + plan.shard_slot[shard_slot_of(u, schedule)], elements));
  }
  return result;
}

}  // namespace minillm::shard
