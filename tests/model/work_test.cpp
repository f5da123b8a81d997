// work() against what operations launch on the simulated device.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sim/blas.h"
#include "sim/counters.h"
#include "tests/model/model_rig.h"

namespace minillm::model::test {
namespace {

using shard::KernelWork;
using shard::Operation;
using Unit = KernelWork::Unit;

/// Kernel functions called, by the launch that each makes exactly once. The others that they make: below.
const std::map<std::string, Unit> kFirstLaunches = {{"embedding_forward", Unit::kOther},
                                                    {"embedding_rows", Unit::kOther},
                                                    {"rmsnorm_forward", Unit::kOther},
                                                    {"rmsnorm_recompute", Unit::kOther},
                                                    {"rmsnorm_backward", Unit::kOther},
                                                    {"silu_forward", Unit::kOther},
                                                    {"silu_backward", Unit::kOther},
                                                    {"bias_gradient", Unit::kOther},
                                                    {"rope", Unit::kOther},
                                                    {"cast", Unit::kOther},
                                                    {"cross_entropy", Unit::kOther},
                                                    {"reciprocal_of_count", Unit::kOther},
                                                    {"sum_ranges", Unit::kOther},
                                                    {"attention_forward", Unit::kAttention},
                                                    {"attention_statistics", Unit::kAttention}};
const std::set<std::string> kFurtherLaunches = {"rmsnorm_backward_dweight",
                                                "bias_gradient_sum",
                                                "sum_partials",
                                                "embedding_starts",
                                                "embedding_pieces",
                                                "attention_backward_keys",
                                                "attention_backward_queries",
                                                "sort_count",
                                                "sort_sum",
                                                "sort_move"};

int64_t products() {
  int64_t sum = 0;
  for (const int64_t count : sim::blas_record().products) sum += count;
  return sum;
}

/// Of gemm_cost(), to be compared as sets: a shape appears once however often it is computed.
using Costs = std::set<std::pair<int64_t, int64_t>>;

Costs costs_of(const std::vector<cuda::GemmKey>& shapes) {
  Costs costs;
  for (const cuda::GemmKey& key : shapes) {
    const Cost cost = cuda::gemm_cost({.m = key.m,
                                       .n = key.n,
                                       .k = key.k,
                                       .beta = key.accumulate ? 1.0f : 0.0f,
                                       .bias = key.bias ? &key : nullptr,
                                       .input = key.input,
                                       .output = key.output});
    costs.emplace(cost.bytes, cost.flops);
  }
  return costs;
}

/// How the operation's launches differ from `planned`; empty when they do not.
std::string difference(ModelRig& rig, const Operation& operation, const std::vector<KernelWork>& planned) {
  std::map<Unit, int64_t> launches, entries;
  const int64_t products_before = products();
  sim::reset_counters();
  const Costs launched = costs_of(rig.run(operation));
  launches[Unit::kProduct] = products() - products_before;
  for (const auto& [kernel, count] : sim::counters().launches) {
    if (const auto found = kFirstLaunches.find(kernel); found != kFirstLaunches.end())
      launches[found->second] += count;
    else if (!kFurtherLaunches.contains(kernel))
      return kernel + " belongs to no kernel function of this test's table";
  }
  Costs costs;
  for (const KernelWork& work : planned) {
    ++entries[work.unit];
    if (work.cost.bytes <= 0) return "a kernel moves no bytes";
    if (work.unit == Unit::kProduct) costs.emplace(work.cost.bytes, work.cost.flops);
  }
  for (const Unit unit : {Unit::kProduct, Unit::kAttention, Unit::kOther})
    if (entries[unit] != launches[unit])
      return std::to_string(entries[unit]) + " instead of " + std::to_string(launches[unit]) + " of unit " +
             std::to_string(static_cast<int>(unit));
  return costs == launched ? "" : "products of other shapes";
}

template <class Visit>
void for_each_operation(const Visit& visit) {
  using enum Recompute;
  for (const bool parts : {true, false}) {
    for (const std::vector<Recompute>& recompute :
         {std::vector{kBlock, kNone}, std::vector{kCheap, kBlock}}) {
      ModelRig rig({.dtype = parts ? DType::kBf16 : DType::kFp32,
                    .rope_and_final_norm = parts,
                    .recomputation = {.blocks = recompute, .deferred_blocks = 2},
                    .head_chunk = recompute.front() == kBlock ? kRows : kHeadChunk},
                   kRows);
      for (const bool split : {false, true}) {
        for (const Operation& operation : micro_batch(rig, split, 0, /*accumulate=*/split)) {
          SCOPED_TRACE(describe(operation, rig.layout().unit_names()));
          visit(rig, operation);
        }
      }
    }
  }
}

TEST(Work, IsWhatOperationsLaunch) {
  for_each_operation([](ModelRig& rig, const Operation& operation) {
    EXPECT_EQ(difference(rig, operation, rig.transformer().work(operation)), "");
  });
}

TEST(Work, AnEntryThatIsMissingOrWrongIsNoticed) {
  if (kSanitized) GTEST_SKIP() << "the same accesses again";
  for_each_operation([](ModelRig& rig, const Operation& operation) {
    const std::vector<KernelWork> work = rig.transformer().work(operation);
    std::vector<KernelWork> wrong(work.begin() + 1, work.end());
    EXPECT_NE(difference(rig, operation, wrong), "");
    wrong = work;
    wrong.back().unit = wrong.back().unit == Unit::kOther ? Unit::kAttention : Unit::kOther;
    EXPECT_NE(difference(rig, operation, wrong), "");
    const auto product = std::ranges::find(work, Unit::kProduct, &KernelWork::unit);
    if (product == work.end()) return;
    wrong = work;
    wrong[static_cast<size_t>(product - work.begin())].cost.flops += 2;
    EXPECT_EQ(difference(rig, operation, wrong), "products of other shapes");
  });
}

TEST(Work, OfASplitBackwardPassIsThatOfTheFusedOneAndACopy) {
  const ModelRig rig({}, kRows);
  const auto total = [&](std::vector<Operation> operations) {
    Cost sum;
    for (const Operation& operation : operations)
      for (const KernelWork& work : rig.transformer().work(operation)) {
        sum.bytes += work.cost.bytes;
        sum.flops += work.cost.flops;
      }
    return std::pair(sum.bytes, sum.flops);
  };
  auto split = total({{.kind = shard::OpKind::kBackwardInput, .unit = 1},
                      {.kind = shard::OpKind::kBackwardWeight, .unit = 1}});
  const int64_t residual =
      rig.transformer().buffers()[static_cast<size_t>(rig.buffer("residual gradient"))].bytes;
  split.first -= 2 * residual;
  EXPECT_EQ(split, total({{.kind = shard::OpKind::kBackward, .unit = 1}}));
}

TEST(Work, OfASplitHeadIsThatOfTheWholeOne) {
  for (const bool norm : {false, true}) {
    const ModelRig rig({.rope_and_final_norm = norm, .head_chunk = kRows}, kRows);
    const Transformer& t = rig.transformer();
    const int head = t.head_unit(), projection = t.projection_segment();
    const auto costs = [&](const std::vector<Operation>& operations) {
      std::multiset<std::pair<int64_t, int64_t>> all;
      for (const Operation& operation : operations)
        for (const KernelWork& work : t.work(operation)) all.emplace(work.cost.bytes, work.cost.flops);
      return all;
    };
    EXPECT_EQ(costs({{.kind = shard::OpKind::kHeadLoss, .unit = head, .segment = projection},
                     {.kind = shard::OpKind::kBackwardInput, .unit = head, .segment = projection - 1}}),
              costs({{.kind = shard::OpKind::kHeadLoss, .unit = head}}));
  }
}

}  // namespace
}  // namespace minillm::model::test
