// Times of single operations, computed by hand.
#include "shard/operation_cost.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "tests/shard/fixtures.h"
#include "tests/unit/errors.h"

namespace minillm::shard {
namespace {

using test::expect_error;

// Nodes of 4 ranks; binary fractions, so that sums are exact.
Hardware toy_hardware() {
  return {.name = "toy",
          .source = "nowhere",
          .gemm_flops_per_s = 1024,
          .peak_flops_per_s = 2048,
          .attention_flops_per_s = 256,
          .memory_bytes_per_s = 64,
          .kernel_s = 0.5,
          .memory_bytes = 1 << 20,
          .multiprocessors = 0,
          .collective_ctas = 0,
          .link = Link{.latency_s = 2, .bytes_per_s = 128, .ranks = 4},
          .network = Network{.latency_s = 16, .bytes_per_s = 8}};
}

class OperationCostTest : public ::testing::Test {
 protected:
  /// Of the one unit, two segments of 128 elements per shard each.
  OperationCost cost(OpKind kind, int shards, int replicas, int segment = -1,
                     std::span<const KernelWork> work = {}) {
    const Layout layout =
        make_layout({{"unit", {{"a", {128, shards}, 0, 0}, {"b", {128, shards}, 0, 1}}}}, shards);
    Schedule schedule;
    schedule.shards = shards;
    schedule.replicas = replicas;
    schedule.reduce_type = reduce_type_;
    return operation_cost({.kind = kind, .unit = 0, .segment = segment}, schedule, layout, work, hardware_,
                          DType::kBf16, settings_);
  }

  static void expect_cost(const OperationCost& found, Resource resource, double latency_s, double busy_s,
                          int64_t wire_bytes) {
    EXPECT_EQ(found.resource, resource);
    EXPECT_EQ(found.latency_s, latency_s);
    EXPECT_EQ(found.busy_s, busy_s);
    EXPECT_EQ(found.wire_bytes, wire_bytes);
  }

  Hardware hardware_ = toy_hardware();
  DType reduce_type_ = DType::kFp32;
  CollectiveSettings settings_;
};

TEST_F(OperationCostTest, AKernelIsBoundByBytesOrItsKindOfOperations) {
  using Unit = KernelWork::Unit;
  const auto of = [&](std::vector<KernelWork> work) { return cost(OpKind::kForward, 2, 1, -1, work); };
  expect_cost(of({{Unit::kOther, {.bytes = 64, .flops = 1 << 20}}}), Resource::kDevice, 0.5, 1, 0);
  expect_cost(of({{Unit::kOther, {.bytes = 64, .extra_bytes = 128}}}), Resource::kDevice, 0.5, 3, 0);
  expect_cost(of({{Unit::kProduct, {.bytes = 64, .flops = 4096}}}), Resource::kDevice, 0.5, 4, 0);
  expect_cost(of({{Unit::kProduct, {.bytes = 512, .flops = 4096}}}), Resource::kDevice, 0.5, 8, 0);
  expect_cost(of({{Unit::kAttention, {.bytes = 64, .flops = 4096}}}), Resource::kDevice, 0.5, 16, 0);
  expect_cost(of({{Unit::kOther, {.bytes = 64}}, {Unit::kProduct, {.flops = 2048}}}), Resource::kDevice, 1, 3,
              0);
  expect_cost(of({}), Resource::kDevice, 0, 0, 0);
}

TEST_F(OperationCostTest, CollectivesWithinANode) {
  // 3 of 4 parts of 256 elements, three hops.
  expect_cost(cost(OpKind::kGather, 4, 1), Resource::kLink, 6.5, 3 * 256 * 2 / 128.0, 3 * 256 * 2);
  expect_cost(cost(OpKind::kReduceScatter, 4, 1), Resource::kLink, 6.5, 3 * 256 * 4 / 128.0, 3 * 256 * 4);
  reduce_type_ = DType::kBf16;
  expect_cost(cost(OpKind::kReduceScatter, 4, 1), Resource::kLink, 6.5, 3 * 256 * 2 / 128.0, 3 * 256 * 2);
  EXPECT_EQ(cost(OpKind::kReduceScatter, 4, 1, 1).wire_bytes, 3 * 128 * 2) << "one segment";
  // Twice 3 of 4 parts, up and down; always fp32.
  expect_cost(cost(OpKind::kAllReduceGradient, 1, 4), Resource::kLink, 12.5, 2 * 3 * 64 * 4 / 128.0,
              2 * 3 * 64 * 4);
  expect_cost(cost(OpKind::kAllReduceLoss, 4, 1), Resource::kLink, 12.5, 0, 0);
  EXPECT_EQ(cost(OpKind::kGather, 3, 1).resource, Resource::kLink) << "part of a node";
  expect_cost(cost(OpKind::kAllReduceLoss, 1, 1), Resource::kDevice, 0, 0, 0);
}

TEST_F(OperationCostTest, CollectivesBetweenNodes) {
  // Two nodes of four: a ring of 7 hops, one of them between nodes; four ranks bring 32 bytes per second.
  expect_cost(cost(OpKind::kGather, 8, 1), Resource::kNetwork, 0.5 + 6 * 2 + 16, 7 * 256 * 2 / 32.0,
              7 * 256 * 2);
  // Three groups of three in nodes of four: the second lies across two nodes.
  expect_cost(cost(OpKind::kGather, 3, 3), Resource::kNetwork, 0.5 + 2 + 16, 2 * 256 * 2 / 16.0, 2 * 256 * 2);
  EXPECT_EQ(cost(OpKind::kAllReduceNorm, 2, 3).resource, Resource::kLink) << "pairs divide a node";
  // Eight nodes: 3 levels of the tree, up and down, after chains of 4.
  EXPECT_EQ(cost(OpKind::kAllReduceCount, 4, 8).latency_s, 0.5 + 2 * (3 * 2 + 3 * 16));
  EXPECT_EQ(cost(OpKind::kAllReduceNorm, 4, 8).latency_s, 12.5) << "within a node";
  // A network that is faster than the link does not make it faster.
  hardware_.network->bytes_per_s = 1000;
  EXPECT_EQ(cost(OpKind::kGather, 8, 1).busy_s, 7 * 256 * 2 / 128.0);
}

TEST_F(OperationCostTest, CollectivesThatAreKernelsHaveThreadBlocks) {
  EXPECT_EQ(cost(OpKind::kGather, 4, 1).ctas, 1) << "not known, but a kernel";
  hardware_.collective_ctas = 24;
  EXPECT_EQ(cost(OpKind::kForward, 4, 1).ctas, 0);
  EXPECT_EQ(cost(OpKind::kGather, 4, 1).ctas, 24);
  EXPECT_EQ(cost(OpKind::kGather, 1, 4).ctas, 0) << "one rank gathers nothing";
  settings_ = {.gather_ctas = 32, .reduce_ctas = 8};
  EXPECT_EQ(cost(OpKind::kGather, 4, 1).ctas, 24) << "NCCL takes no more than it wants";
  EXPECT_EQ(cost(OpKind::kReduceScatter, 4, 1).ctas, 8);
  EXPECT_EQ(cost(OpKind::kAllReduceGradient, 1, 4).ctas, 8);
  EXPECT_EQ(cost(OpKind::kAllReduceLoss, 4, 1).ctas, 1);
  settings_.copy_engines = true;
  EXPECT_EQ(cost(OpKind::kGather, 4, 1).ctas, 0);
  EXPECT_EQ(cost(OpKind::kGather, 8, 1).ctas, 24) << "between nodes";
  EXPECT_EQ(cost(OpKind::kReduceScatter, 4, 1).ctas, 8);
}

TEST_F(OperationCostTest, HybridsReplicateOverNodes) {
  EXPECT_EQ(cost(OpKind::kGather, 4, 2).resource, Resource::kLink);
  // One rank of the group on each of two nodes.
  expect_cost(cost(OpKind::kAllReduceGradient, 4, 2), Resource::kNetwork, 0.5 + 2 * 16, 256 * 4 / 8.0,
              256 * 4);
  // Ranks 0 and 2 of a node, and again on the next: half of each, two ranks with a node's adapters.
  expect_cost(cost(OpKind::kAllReduceGradient, 2, 4), Resource::kNetwork, 0.5 + 2 * (2 + 16),
              2 * 3 * 64 * 4 / 16.0, 2 * 3 * 64 * 4);
  EXPECT_EQ(cost(OpKind::kAllReduceGradient, 2, 2).resource, Resource::kLink) << "all in one node";
}

TEST_F(OperationCostTest, CopiesAreKernels) {
  const std::vector<KernelWork> moved{{KernelWork::Unit::kOther, {.bytes = 256}}};
  for (OpKind kind : {OpKind::kCopyIn, OpKind::kCopyOut, OpKind::kReduceCopyIn}) {
    EXPECT_TRUE(is_copy(kind));
    expect_cost(cost(kind, 4, 1, -1, moved), Resource::kDevice, 0.5, 4, 0);
  }
  EXPECT_FALSE(is_copy(OpKind::kGather) || is_copy(OpKind::kUpload) || is_copy(OpKind::kForward));
}

TEST_F(OperationCostTest, TellsWhatIsNotKnown) {
  hardware_.network.reset();
  EXPECT_EQ(cost(OpKind::kGather, 4, 1).resource, Resource::kLink);
  expect_error<UsageError>([&] { cost(OpKind::kGather, 8, 1); },
                           {"hardware 'toy'", "'gather'", "'network' is not given", "\"latency_s\""});
  hardware_.link->bytes_per_s = 0;
  expect_error<UsageError>([&] { cost(OpKind::kGather, 4, 1); }, {"'link' is not given"});
  hardware_.link.reset();
  expect_error<UsageError>([&] { cost(OpKind::kAllReduceLoss, 2, 1); },
                           {"hardware 'toy'", "'all-reduce loss'", "'link' is not given", "\"ranks\""});
  EXPECT_EQ(cost(OpKind::kAllReduceLoss, 1, 1).latency_s, 0) << "nothing to know for one rank";
}

class WorkingProgram : public DeclaredProgram {
 public:
  std::vector<KernelWork> work(const Operation& operation) const override {
    if (is_collective(operation.kind)) throw InternalError("not a program's");
    return {{KernelWork::Unit::kOther, {.bytes = 64 * (1 + operation.unit)}}};
  }
};

TEST_F(OperationCostTest, OfAllOperations) {
  const Layout layout = make_layout(make_units(1), 2);
  WorkingProgram program;
  Schedule schedule;
  schedule.shards = 2;
  schedule.operations = {{.kind = OpKind::kGather, .unit = 1}, {.kind = OpKind::kForward, .unit = 1}};
  const auto costs = operation_costs(schedule, layout, program, hardware_, DType::kBf16);
  ASSERT_EQ(costs.size(), 2u);
  EXPECT_EQ(costs[0].wire_bytes, 2 * layout.units[1].shard_elements);
  EXPECT_EQ(costs[1].busy_s, 2);
  schedule.operations.push_back({.kind = OpKind::kCopyOut, .unit = 1});
  expect_error<InternalError>([&] { operation_costs(schedule, layout, program, hardware_, DType::kBf16); },
                              {"'copy out block0'"});
  schedule.shards = 4;
  expect_error<InternalError>([&] { operation_costs(schedule, layout, program, hardware_, DType::kBf16); },
                              {"2 shards", "for 4"});
}

}  // namespace
}  // namespace minillm::shard
