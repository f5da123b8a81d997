// What the step is built for, in figures: memory, exposed communication, and time beside PyTorch FSDP2's
// order, for the reference model on modelled hardware. A change that loses any of it fails here.
//
// The bounds are targets; what is reached today is printed and noted beside those that are close.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <set>

#include "core/format.h"
#include "support.h"
#include "train/evaluation.h"
#include "train/policy_search.h"

namespace minillm::train {
namespace {

using shard::OpKind;
using test::h100;
using test::node;
using test::reference;

constexpr double kGigabyte = 1e9;

double gigabytes(const Evaluation& evaluation) {
  return static_cast<double>(evaluation.plan.memory.bytes) / kGigabyte;
}

void print(const std::string& name, const Evaluation& evaluation) {
  const shard::Timeline& timeline = evaluation.timeline;
  std::cout << format("%-34s %-8s %6.2f GB  step %8.3f ms  exposed %7.3f ms (%.2f %%)\n", name.c_str(),
                      evaluation.policy.c_str(), gigabytes(evaluation), timeline.step_s * 1e3,
                      timeline.exposed_comm_s * 1e3, 100 * timeline.exposed_comm_s / timeline.step_s);
}

/// An evaluation of the reference and FSDP2's of the same.
struct Comparison {
  Comparison(const std::string& name, const config::Config& config, const World& world,
             const shard::Hardware& hardware)
      : ours(evaluate(config, world, hardware)), fsdp2(evaluate_fsdp2(config, world, hardware)) {
    print(name, ours);
    print("", fsdp2);
  }
  double speedup() const { return fsdp2.timeline.step_s / ours.timeline.step_s; }
  double memory() const { return gigabytes(ours) / gigabytes(fsdp2); }
  double exposed_share() const { return ours.timeline.exposed_comm_s / ours.timeline.step_s; }

  Evaluation ours, fsdp2;
};

TEST(Targets, MemoryOfFourRanks) {
  const auto planned = [](const char* recompute) {
    const config::Config config = reference({std::string("memory.recompute=") + recompute});
    return static_cast<double>(make_step_plan(config, node(4)).memory.bytes) / kGigabyte;
  };
  EXPECT_LE(planned("cheap"), 7.3);
  EXPECT_LE(planned("block"), 4.1);
  EXPECT_EQ(evaluate_fsdp2(reference(), node(4), h100()).plan.memory.bytes, 10'523'833'344)
      << "as measured: tests/unit/eager_memory_test.cpp";
}

// 0.685 of FSDP2's memory at 1.06 times its speed; one rank, which shares its weights with nobody, 0.935 at
// 1.10. With bf16 weights of their own beside the fp32 masters these would be 0.72 and 1.02.
TEST(Targets, MemoryBesideFsdp2) {
  const Comparison four("4 ranks, cheap", reference({"memory.recompute=cheap"}), node(4), h100());
  EXPECT_LE(four.memory(), 0.70);
  EXPECT_GE(four.speedup(), 1.05);
  const Comparison one("1 rank, none", reference({"memory.recompute=none"}), node(1), h100());
  EXPECT_LT(one.memory(), 0.95);
  EXPECT_GE(one.speedup(), 1.09);
}

class OnANode : public ::testing::TestWithParam<bool> {
 protected:
  Comparison compare(std::vector<std::string> overrides) const {
    overrides.push_back(GetParam() ? "train.cuda_graph=true" : "train.cuda_graph=false");
    const std::string name = overrides.front() + (GetParam() ? ", graph" : ", eager");
    return Comparison(name, reference(overrides), node(8), h100());
  }
};
INSTANTIATE_TEST_SUITE_P(Targets, OnANode, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "cuda_graph" : "eager"; });

// As a graph gathers are kernels, as FSDP2's are, and take multiprocessors from the products that hide them;
// eager they are copy engines'. That is worth 0.03 of these factors.
double least_speedup(double eager, bool graph) {
  return graph ? eager - 0.03 : eager;
}

// FSDP2 recomputes nothing, so this is the same arithmetic. 1.089 eager; 1.059 as a graph, whose steps do not
// overlap: what is exposed is the last segment's way over the wire, 0.47 %.
TEST_P(OnANode, NothingRecomputed) {
  const Comparison found = compare({"memory.recompute=none"});
  EXPECT_LE(found.exposed_share(), 0.005);
  EXPECT_LE(found.ours.timeline.exposed_comm_s, found.fsdp2.timeline.exposed_comm_s / 5);
  EXPECT_GE(found.speedup(), least_speedup(1.08, GetParam()));
  EXPECT_LE(found.memory(), 1);
}

// 1.064 eager, 1.036 as a graph, with 0.64 of the memory.
TEST_P(OnANode, CheapRecomputation) {
  const Comparison found = compare({"memory.recompute=cheap"});
  EXPECT_LE(found.exposed_share(), 0.005);
  EXPECT_LE(found.ours.timeline.exposed_comm_s, found.fsdp2.timeline.exposed_comm_s / 5);
  EXPECT_GE(found.speedup(), least_speedup(1.06, GetParam()));
  EXPECT_LE(found.memory(), 0.7);
}

// All updates wait for the norm, and the first gathers for the updates: 0.18 % are exposed, of a longer step.
// 1.094 eager, 1.069 as a graph.
TEST_P(OnANode, Clipping) {
  const Comparison found = compare({"train.grad_clip=1", "memory.recompute=none"});
  EXPECT_LE(found.exposed_share(), 0.005);
  EXPECT_GT(found.ours.timeline.exposed_comm_s, 0);
  EXPECT_GE(found.speedup(), least_speedup(1.08, GetParam()));
}

/// Gathers, reductions, and the part of the head that comes between: the loss and the gradient of its weight.
double seconds_in_turn(const Evaluation& evaluation) {
  double seconds = 0;
  for (size_t i = 0; i < evaluation.costs.size(); ++i) {
    const shard::OperationCost& cost = evaluation.costs[i];
    if (cost.wire_bytes > 0 || evaluation.plan.schedule.operations[i].kind == OpKind::kHeadLoss)
      seconds += cost.latency_s + cost.busy_s;
  }
  return seconds;
}

// 64 nodes of one rank with 45 GB/s each, so that the wire is what limits. All weights have to arrive before
// the head can run, and the first gradient leaves when the head's weight has its own, so that the wire is
// idle for two of the head's three products. `auto` takes groups of 8, since a ring of 64 ranks passes 63
// hops before it is full, which costs every collective 0.9 ms: 1.53 times FSDP2's speed, and 1.27 times that
// of HSDP with the same groups. The step is no longer than the wire and what has to come between.
TEST(Targets, NetworkOfOneRankPerNode) {
  const World world{.ranks = 64, .ranks_per_node = 1};
  shard::Hardware hardware = h100();
  hardware.link->ranks = 1;
  hardware.network->bytes_per_s = 45e9;
  const Evaluation fsdp2 = evaluate_fsdp2(reference({"memory.recompute=none"}), world, hardware);
  const int64_t bytes = fsdp2.plan.memory.bytes;
  const config::Config chosen =
      chosen_of(search_policy(reference({"parallel.policy=auto"}), world, hardware, bytes), world, bytes);
  const Evaluation ours = evaluate(chosen, world, hardware);
  print("64 x 45 GB/s", ours);
  print("", fsdp2);
  const double in_turn_s = seconds_in_turn(ours);
  std::cout << format("%-34s wire, loss and the head's weight in turn %.3f ms\n", "", in_turn_s * 1e3);
  EXPECT_LE(ours.plan.memory.bytes, bytes);
  EXPECT_GE(fsdp2.timeline.step_s / ours.timeline.step_s, 1.50);
  ASSERT_EQ(chosen.parallel.policy, "hybrid");
  const Evaluation hsdp = evaluate_fsdp2(chosen, world, hardware);
  print("", hsdp);
  EXPECT_GE(hsdp.timeline.step_s / ours.timeline.step_s, 1.25);
  EXPECT_LE(ours.timeline.step_s, 1.01 * in_turn_s) << "the last update, no more";
}

// The wire, or where that is shorter the kernels, and nothing beside: with weights kept and a gradient slot
// per unit neither direction waits for memory.
TEST(Targets, SlowWires) {
  for (const double gigabytes_per_s : {5, 10, 25}) {
    shard::Hardware hardware = h100();
    hardware.link = shard::Link{.latency_s = 0, .bytes_per_s = gigabytes_per_s * kGigabyte, .ranks = 8};
    hardware.network.reset();
    for (const char* clip : {"train.grad_clip=0", "train.grad_clip=1"}) {
      SCOPED_TRACE(format("%g GB/s, %s", gigabytes_per_s, clip));
      const config::Config config = reference({"parallel.policy=grads", "parallel.gradient_slots=14", clip});
      const Evaluation ours = evaluate(config, node(8), hardware);
      print(format("%g GB/s, %s", gigabytes_per_s, clip), ours);
      const double wire_s = ours.timeline.busy_s[static_cast<size_t>(shard::Resource::kLink)];
      const double sent = 735'199'232.0 * (2 + 4) * 7 / 8;  // each unit once in bf16, its gradients in fp32
      EXPECT_NEAR(wire_s, sent / (gigabytes_per_s * kGigabyte), 0.001 * wire_s);
      EXPECT_LE(ours.timeline.step_s, 1.05 * std::max(wire_s, ours.timeline.compute_s));
    }
  }
}

/// Units in the order in which they are gathered; segments of one gather count once.
std::vector<int> gathered_units(const shard::Schedule& schedule) {
  std::vector<int> units;
  std::set<int> segments;
  for (const shard::Operation& operation : schedule.operations) {
    if (operation.kind != OpKind::kGather) continue;
    const bool goes_on = !units.empty() && units.back() == operation.unit && operation.segment >= 0 &&
                         !segments.contains(-1) && !segments.contains(operation.segment);
    if (!goes_on) {
      units.push_back(operation.unit);
      segments.clear();
    }
    segments.insert(operation.segment);
  }
  return units;
}

bool twice_in_a_row(const std::vector<int>& units) {
  return std::ranges::adjacent_find(units) != units.end() || units.front() == units.back();
}

// The blocks at the turn and the embedding's backward pass need no gather.
TEST(Targets, GathersOfTwoSlots) {
  for (const int blocks : {2, 3, 12}) {
    for (const char* recompute : {"none", "cheap", "block"}) {
      SCOPED_TRACE(format("%d blocks, recompute %s", blocks, recompute));
      const config::Config config =
          reference({format("model.n_layers=%d", blocks), std::string("memory.recompute=") + recompute,
                     "parallel.weight_slots=2"});
      const std::vector<int> units = gathered_units(make_step_plan(config, node(4)).schedule);
      EXPECT_LE(std::ssize(units), (blocks - 2) + blocks + 2);
      EXPECT_FALSE(twice_in_a_row(units));
      EXPECT_EQ(std::set<int>(units.begin(), units.end()).size(), static_cast<size_t>(blocks) + 2);
    }
  }
}

TEST(Targets, GathersAreCounted) {
  shard::Schedule schedule;
  const auto gather = [&](int unit, int segment) {
    schedule.operations.push_back({.kind = OpKind::kGather, .unit = unit, .segment = segment});
  };
  for (int segment : {2, 0, 1}) gather(1, segment);
  gather(2, -1);
  EXPECT_EQ(gathered_units(schedule), (std::vector{1, 2}));
  EXPECT_FALSE(twice_in_a_row(gathered_units(schedule)));
  gather(2, -1);
  EXPECT_TRUE(twice_in_a_row(gathered_units(schedule))) << "again, whole";
  schedule.operations.pop_back();
  for (int segment : {0, 1, 0}) gather(3, segment);
  EXPECT_TRUE(twice_in_a_row(gathered_units(schedule))) << "again, a segment";
  schedule.operations.pop_back();
  gather(1, -1);
  EXPECT_TRUE(twice_in_a_row(gathered_units(schedule))) << "over the end of the step";
}

}  // namespace
}  // namespace minillm::train
