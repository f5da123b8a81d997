#include "train/plan_report.h"

#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/format.h"

namespace minillm::train {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kNameColumns = 26, kValueColumns = 16;

std::string megabytes(int64_t bytes) {
  return format("%.1f MB", static_cast<double>(bytes) * 1e-6);
}

std::string milliseconds(double seconds) {
  return format("%.3f ms", seconds * 1e3);
}

std::string pad(const std::string& text, int columns) {
  return format("%*s", columns, text.c_str());
}

std::string recompute_text(const config::Config& config) {
  std::string text;
  for (const config::Recompute mode : config.memory.recompute) {
    if (!text.empty()) text += ",";
    text += name_of(mode);
  }
  return text;
}

double share(double part, double whole) {
  return whole > 0 ? 100 * part / whole : 0;
}

Json numbers(const Evaluation& evaluation, const shard::Hardware& hardware) {
  const StepPlan& plan = evaluation.plan;
  const shard::Timeline& timeline = evaluation.timeline;
  Json document;
  document["policy"] = evaluation.policy;
  document["world"] = evaluation.world.ranks;
  document["shards"] = plan.division.shards;
  document["replicas"] = plan.division.replicas;
  document["memory"]["peak_bytes"] = plan.memory.bytes;
  for (const shard::Purpose purpose : shard::kPurposes)
    document["memory"]["by_purpose"][name_of(purpose)] = plan.memory.peak_bytes(purpose);
  document["comm"]["bytes_per_rank"] = {{"all_gather", timeline.wire_bytes.gather},
                                        {"reduce_scatter", timeline.wire_bytes.reduce_scatter},
                                        {"all_reduce", timeline.wire_bytes.all_reduce}};
  document["time"] = {{"step_s", timeline.step_s},
                      {"compute_s", timeline.compute_s},
                      {"exposed_comm_s", timeline.exposed_comm_s}};
  document["tokens_per_s_per_gpu"] = evaluation.tokens_per_s();
  document["mfu"] = hardware.peak_flops_per_s ? Json(evaluation.mfu(hardware)) : Json();
  return document;
}

}  // namespace

std::string plan_header(const Evaluation& evaluation, const shard::Hardware& hardware) {
  const StepPlan& plan = evaluation.plan;
  const config::Train& train = plan.config.train;
  const auto count = [](int64_t value) { return std::to_string(value); };
  std::string text =
      count(plan.layout->elements()) + " parameters in " + std::string(name_of(plan.config.precision.param)) +
      ", " + count(train.grad_accumulation) + " x " + count(train.micro_batch) + " x " +
      count(train.seq_len) + " tokens per rank and step; " + count(evaluation.world.ranks) + " ranks, " +
      count(evaluation.world.ranks_per_node) + " per node; " + hardware.name + "\n";
  text += "policy " + evaluation.policy + ": " + count(plan.division.shards) + " ranks share a model, " +
          count(plan.division.replicas) + (plan.division.replicas == 1 ? " copy" : " copies");
  if (evaluation.policy == "fsdp2") return text + "\n";
  return text + "; " + count(std::ssize(plan.schedule.weight_slots)) + " weight slots, " +
         count(std::ssize(plan.schedule.gradient_slots)) + " gradient slots, " +
         count(plan.policy.deferred_blocks) + " deferred blocks; recompute " + recompute_text(plan.config) +
         "; logits of " + count(train.head_chunk) + " rows at a time\n";
}

std::string plan_table(std::span<const Evaluation* const> evaluations, const shard::Hardware& hardware) {
  std::string text;
  const auto row = [&](const std::string& name, const std::function<std::string(const Evaluation&)>& value) {
    text += format("  %-*s", kNameColumns, name.c_str());
    for (const Evaluation* evaluation : evaluations) text += pad(value(*evaluation), kValueColumns);
    text += "\n";
  };
  row("", [](const Evaluation& e) { return e.policy; });
  text += "memory\n";
  for (const shard::Purpose purpose : shard::kPurposes)
    row(name_of(purpose), [&](const Evaluation& e) { return megabytes(e.plan.memory.peak_bytes(purpose)); });
  row("peak", [](const Evaluation& e) { return megabytes(e.plan.memory.bytes); });
  text += "sent by a rank per step\n";
  row("all-gather", [](const Evaluation& e) { return megabytes(e.timeline.wire_bytes.gather); });
  row("reduce-scatter", [](const Evaluation& e) { return megabytes(e.timeline.wire_bytes.reduce_scatter); });
  row("all-reduce", [](const Evaluation& e) { return megabytes(e.timeline.wire_bytes.all_reduce); });
  text += "time\n";
  row("step", [](const Evaluation& e) { return milliseconds(e.timeline.step_s); });
  row("of it exposed", [](const Evaluation& e) { return milliseconds(e.timeline.exposed_comm_s); });
  row("", [](const Evaluation& e) {
    return format("%.2f %%", share(e.timeline.exposed_comm_s, e.timeline.step_s));
  });
  row("tokens/s per GPU", [](const Evaluation& e) { return format("%.1fk", e.tokens_per_s() * 1e-3); });
  if (hardware.peak_flops_per_s)
    row("MFU", [&](const Evaluation& e) { return format("%.1f %%", 100 * e.mfu(hardware)); });
  return text;
}

std::string schedule_listing(const Evaluation& evaluation) {
  const StepPlan& plan = evaluation.plan;
  const std::vector<std::string> names = plan.layout->unit_names();
  std::string text;
  for (size_t i = 0; i < plan.schedule.operations.size(); ++i) {
    const shard::Operation& operation = plan.schedule.operations[i];
    const shard::OperationTime& time = evaluation.timeline.operations[i];
    text += format("%4zu %9.3f %9.3f ms  %-9s ", i, time.start_s * 1e3, time.end_s * 1e3,
                   name_of(operation.stream)) +
            describe(operation, names);
    std::string waits;
    for (const shard::Wait& wait : plan.waits[i])
      waits += (waits.empty() ? "" : ", ") + std::to_string(wait.operation) +
               (wait.steps_back > 0 ? " of the step before" : "");
    if (!waits.empty()) text += "; waits for " + waits;
    text += "\n";
  }
  return text;
}

std::string plan_json(const Evaluation& evaluation, const shard::Hardware& hardware, const Evaluation* peer) {
  Json document = numbers(evaluation, hardware);
  document["settings"] = {{"weight_slots", std::ssize(evaluation.plan.schedule.weight_slots)},
                          {"gradient_slots", std::ssize(evaluation.plan.schedule.gradient_slots)},
                          {"deferred_blocks", evaluation.plan.policy.deferred_blocks},
                          {"head_chunk", evaluation.plan.config.train.head_chunk},
                          {"recompute", recompute_text(evaluation.plan.config)},
                          {"cuda_graph", evaluation.plan.config.train.cuda_graph}};
  document["hardware"] = hardware.name;
  if (peer != nullptr) document["peer"] = numbers(*peer, hardware);
  return document.dump(2);
}

}  // namespace minillm::train
