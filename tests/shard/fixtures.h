// Models and programs that the tests of src/shard share.
#pragma once

#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shard/builder.h"
#include "shard/layout.h"
#include "shard/program.h"
#include "shard/schedule.h"

namespace minillm::shard {

inline std::string numbered(std::string name, int number) {
  return name.append(std::to_string(number));
}

/// An embedding, `blocks` blocks and a head, with tensors of dimension `dim`.
inline std::vector<UnitSpec> make_units(int blocks, int64_t dim = 3) {
  std::vector<UnitSpec> units;
  units.push_back({"embedding", {{"table", {5, dim}}}, 1});
  for (int i = 0; i < blocks; ++i)
    units.push_back({numbered("block", i), {{"norm", {dim}}, {"weight", {dim, dim}}}, 0});
  units.push_back({"head", {{"weight", {7, dim}}}, 1});
  return units;
}

/// The same with blocks of two segments, the second the larger one.
inline std::vector<UnitSpec> make_segmented_units(int blocks, int64_t dim = 3) {
  std::vector<UnitSpec> units = make_units(blocks, dim);
  for (UnitSpec& unit : units)
    if (unit.slot_group == 0)
      unit.tensors = {
          {"bias", {dim}}, {"weight", {dim, dim}}, {"norm", {dim}, 0, 1}, {"ffn", {2 * dim, dim}, 0, 1}};
  return units;
}

/// The same with a head of two segments, cut elsewhere than blocks are.
inline std::vector<UnitSpec> make_units_with_norm(int blocks, int64_t dim = 3) {
  std::vector<UnitSpec> units = make_segmented_units(blocks, dim);
  units.back().tensors = {{"norm", {2 * dim}}, {"weight", {7, dim}, 0, 1}};
  return units;
}

/// A program that declares buffers and computes nothing.
class DeclaredProgram : public Program {
 public:
  std::vector<BufferSpec> specs;
  std::map<std::pair<OpKind, int>, BufferUse> table;

  const std::vector<BufferSpec>& buffers() const override { return specs; }
  BufferUse uses(const Operation& operation) const override {
    const auto found = table.find({operation.kind, operation.unit});
    return found == table.end() ? BufferUse{} : found->second;
  }
  std::vector<KernelWork> work(const Operation&) const override { return {}; }
  void compute(const Operation&, const Operands&, cudaStream_t) override {
    throw std::logic_error("DeclaredProgram computes nothing");
  }
};

/// The kinds that Program::compute is called for, each with the units it is called with.
inline std::vector<std::pair<OpKind, int>> compute_calls(int units) {
  std::vector<std::pair<OpKind, int>> calls;
  for (OpKind kind : {OpKind::kUpload, OpKind::kSetStep, OpKind::kBegin, OpKind::kCollectLoss, OpKind::kGate,
                      OpKind::kCollectNorm, OpKind::kClip, OpKind::kReadBack})
    calls.emplace_back(kind, -1);
  for (int u = 0; u < units; ++u) {
    const bool head = u == units - 1;
    calls.emplace_back(head ? OpKind::kHeadLoss : OpKind::kForward, u);
    if (!head) calls.emplace_back(OpKind::kBackward, u);
    if (u > 0) calls.emplace_back(OpKind::kBackwardInput, u);
    if (!head && u > 0)
      for (OpKind kind : {OpKind::kRecompute, OpKind::kBackwardWeight}) calls.emplace_back(kind, u);
    for (OpKind kind : {OpKind::kCast, OpKind::kAccumulate, OpKind::kSquareNorm, OpKind::kUpdate})
      calls.emplace_back(kind, u);
  }
  return calls;
}

/// A model, program and policy drawn at random.
struct RandomCase {
  Layout layout;
  DeclaredProgram program;
  Policy policy;
};

inline RandomCase make_random_case(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  RandomCase result;
  std::vector<UnitSpec> units;
  const int count = 2 + below(11);
  for (int u = 0; u < count; ++u) {
    UnitSpec unit{numbered("unit", u), {}, below(3)};
    int segment = 0;
    for (int t = 0; t <= below(3); ++t) {
      unit.tensors.push_back({numbered("t", t), {1 + below(40), 1 + below(40)}, 0, segment});
      segment += below(2);
    }
    units.push_back(unit);
  }
  result.layout = make_layout(units, 1 + below(5));
  Policy& policy = result.policy;
  policy.replicas = 1 + below(3);
  policy.weight_slots = 2 + below(4);
  policy.gradient_slots = 1 + below(4);
  policy.deferred_blocks = below(4);
  policy.split_head = result.layout.units.back().segments.size() <= 2 && below(2);
  policy.micro_batches = 1 + (below(2) ? below(3) : 0);
  policy.reduce_every_micro_batch = below(2);
  policy.clip = below(2);
  policy.keep_gradients = below(4) == 0;
  policy.reduce_type = below(3) == 0 ? DType::kBf16 : DType::kFp32;
  if (below(2))
    for (int u = 0; u < count; ++u) policy.recompute.push_back(u > 0 && u + 1 < count && below(2));
  const auto calls = compute_calls(count);
  for (int b = below(12); b > 0; --b) {
    const int index = static_cast<int>(result.program.specs.size());
    result.program.specs.push_back(
        {numbered("buffer", index), below(5000), static_cast<Purpose>(5 + below(4))});
    for (int use = 1 + below(6); use > 0; --use) {
      BufferUse& uses =
          result.program.table[calls[static_cast<size_t>(below(static_cast<int>(calls.size())))]];
      (below(2) ? uses.reads : uses.writes).push_back(index);
    }
  }
  return result;
}

}  // namespace minillm::shard
