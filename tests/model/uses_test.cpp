// uses() is what the memory plan and the waits believe. Each operation runs with every buffer that it does
// not declare as read full of NaN: what it leaves must be what it leaves on intact memory, and what it does
// not declare as written must still be poison.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/model/model_rig.h"

namespace minillm::model::test {
namespace {

using shard::BufferUse;
using shard::Operation;

bool contains(const std::vector<int>& list, int buffer) {
  return std::ranges::find(list, buffer) != list.end();
}

bool is_poison(const Bytes& bytes) {
  return std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0xFF}; });
}

/// Operations run one after another on intact memory, and the state before each and at the end.
struct Trace {
  std::vector<Operation> operations;
  std::vector<State> states;

  Trace(ModelRig& rig, std::vector<Operation> list) : operations(std::move(list)) {
    states.push_back(rig.save());
    for (const Operation& operation : operations) {
      rig.run(operation);
      states.push_back(rig.save());
    }
  }

  /// Whether what operation `index` leaves in a buffer matters.
  bool is_read_later(const ModelRig& rig, size_t index, int buffer) const {
    for (size_t i = index + 1; i < operations.size(); ++i) {
      const BufferUse use = rig.transformer().uses(operations[i]);
      if (contains(use.reads, buffer)) return true;
      if (contains(use.writes, buffer)) return false;
    }
    return false;
  }
};

/// What is wrong with operation `index` of the trace using memory as `use` says; empty when nothing is.
std::string fault(ModelRig& rig, const Trace& trace, size_t index, const BufferUse& use) {
  const State& before = trace.states[index];
  const State& expected = trace.states[index + 1];
  const auto& specs = rig.transformer().buffers();
  rig.restore(before);
  for (int buffer = 0; buffer < std::ssize(specs); ++buffer)
    if (!contains(use.reads, buffer)) rig.poison(buffer);
  rig.run(trace.operations[index]);
  const State after = rig.save();
  if (after.gradients != expected.gradients || after.loss_sums != expected.loss_sums)
    return "gradients or losses depend on what is not declared";
  for (int buffer = 0; buffer < std::ssize(specs); ++buffer) {
    const auto i = static_cast<size_t>(buffer);
    const bool reads = contains(use.reads, buffer), writes = contains(use.writes, buffer);
    if (writes && !reads && is_poison(after.buffers[i])) return "does not write " + specs[i].name;
    if (!writes && !reads && !is_poison(after.buffers[i])) return "writes " + specs[i].name;
    if (!writes && reads && after.buffers[i] != before.buffers[i]) return "changes " + specs[i].name;
    if (writes && trace.is_read_later(rig, index, buffer) && after.buffers[i] != expected.buffers[i])
      return specs[i].name + " depends on what is not declared";
  }
  return "";
}

struct Plan {
  Variant variant;
  bool split;
};

// Wide enough that all logits fill the wide scratch, which is then compared to the last byte.
constexpr int64_t kVocabulary = 133;

std::vector<Plan> plans() {
  using enum Recompute;
  std::vector<Plan> all = {{{.recomputation = {.blocks = {kBlock, kNone}, .deferred_blocks = 2}}, true},
                           {{.recomputation = {.blocks = {kBlock, kCheap}}}, false},
                           {{.vocabulary = kVocabulary, .head_chunk = kRows}, true}};
  if (kSanitized) return all;
  all.push_back({{.rope_and_final_norm = false, .recomputation = {.blocks = {kNone, kCheap}}}, false});
  all.push_back(
      {{.dtype = DType::kFp32, .rope_and_final_norm = false, .vocabulary = kVocabulary, .head_chunk = kRows},
       true});
  return all;
}

template <class Visit>
void for_each_operation(const Visit& visit) {
  for (const Plan& plan : plans()) {
    ModelRig rig(plan.variant, kRows);
    const Trace trace(rig, micro_batch(rig, plan.split));
    for (size_t index = 0; index < trace.operations.size(); ++index) {
      SCOPED_TRACE(describe(trace.operations[index], rig.layout().unit_names()));
      visit(rig, trace, index, rig.transformer().uses(trace.operations[index]));
    }
  }
}

TEST(Uses, AreAllThatOperationsTouch) {
  for_each_operation([](ModelRig& rig, const Trace& trace, size_t index, const BufferUse& use) {
    EXPECT_EQ(fault(rig, trace, index, use), "");
  });
}

TEST(Uses, AreWrittenBeforeTheyAreRead) {
  for (const Plan& plan : plans()) {
    const ModelRig rig(plan.variant, kRows);
    const auto& specs = rig.transformer().buffers();
    std::set<int> written;
    for (const Operation& operation : micro_batch(rig, plan.split)) {
      const BufferUse use = rig.transformer().uses(operation);
      for (const int buffer : use.reads)
        EXPECT_TRUE(written.contains(buffer) ||
                    specs[static_cast<size_t>(buffer)].purpose == shard::Purpose::kInputs)
            << describe(operation, rig.layout().unit_names()) << ": "
            << specs[static_cast<size_t>(buffer)].name;
      written.insert(use.writes.begin(), use.writes.end());
    }
  }
}

// The checker finds each declaration that is left out; so no operation declares a buffer, and has memory kept
// for it, that it could do without.
TEST(Uses, EachThatIsLeftOutIsNoticed) {
  if (kSanitized) GTEST_SKIP() << "the same accesses again";
  for_each_operation([](ModelRig& rig, const Trace& trace, size_t index, const BufferUse& use) {
    for (const bool reads : {true, false}) {
      for (const int buffer : reads ? use.reads : use.writes) {
        if (buffer == rig.transformer().tokens()) continue;  // poisoned tokens lie outside of the table
        BufferUse less = use;
        std::erase(reads ? less.reads : less.writes, buffer);
        EXPECT_NE(fault(rig, trace, index, less), "")
            << (reads ? "reads " : "writes ")
            << rig.transformer().buffers()[static_cast<size_t>(buffer)].name;
      }
    }
  });
}

TEST(Uses, OneTooManyIsNoticed) {
  ModelRig rig({}, kRows);
  const Trace trace(rig, micro_batch(rig, /*split=*/false));
  BufferUse use = rig.transformer().uses(trace.operations[1]);
  use.writes.push_back(rig.buffer("block1 qkv"));
  EXPECT_EQ(fault(rig, trace, 1, use), "does not write block1 qkv");
}

TEST(Uses, InputsAreUploadedAndCounted) {
  const ModelRig rig({}, kRows);
  const Transformer& t = rig.transformer();
  const BufferUse upload = t.uses({.kind = shard::OpKind::kUpload}),
                  begin = t.uses({.kind = shard::OpKind::kBegin});
  EXPECT_EQ(upload.writes, (std::vector{t.tokens(), t.targets()}));
  EXPECT_EQ(begin.reads, std::vector{t.targets()});
}

}  // namespace
}  // namespace minillm::model::test
