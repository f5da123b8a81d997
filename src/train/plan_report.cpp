#include "train/plan_report.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/format.h"
#include "train/memory_advice.h"

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

std::string joined(const std::vector<std::string>& items, const char* separator) {
  std::string text;
  for (const std::string& item : items) {
    if (!text.empty()) text += separator;
    text += item;
  }
  return text;
}

/// "1 rank", "2 ranks".
std::string counted(int64_t count, const std::string& what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

std::string slots_lines(const StepPlan& plan) {
  const shard::Schedule& schedule = plan.schedule;
  std::string text = "weights in place, no gathers\n";
  if (!schedule.weight_slots.empty()) {
    const int64_t of_blocks = std::ranges::count(schedule.weight_slots, 0, &shard::Slot::group);
    text = "weight slots: " + std::to_string(of_blocks) + " for blocks, " +
           std::to_string(std::ssize(schedule.weight_slots) - of_blocks) + " for embedding and head\n";
  }
  const int64_t slots =
      std::ssize(schedule.gradient_slots.empty() ? schedule.shard_slots : schedule.gradient_slots);
  const int deferred = plan.policy.deferred_blocks, own = deferred > 0 ? deferred + 1 : 0;
  text += "gradient slots: " + std::to_string(slots - own);
  if (own > 0)
    text += ", " + std::to_string(own) + " more for " + counted(deferred, "deferred block") +
            " and the embedding";
  return text + "\n";
}

/// What a reader of the table has to know beside it.
std::string remarks(const Evaluation& own, const Evaluation& peer, const shard::Hardware& hardware) {
  std::string text;
  if (!peer.left_out.empty()) text = peer.policy + " goes without " + joined(peer.left_out, ", ") + "\n";
  const int64_t available = own.plan.config.memory.available(hardware.memory_bytes);
  if (own.plan.memory.bytes <= available) return text;
  text += own.policy + " does not fit.";
  if (own.policy != "fsdp2") text.append(" ").append(advise_on_memory(own.plan.config, own.world, available));
  return text + "\n";
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
  document["memory"]["available_bytes"] = plan.config.memory.available(hardware.memory_bytes);
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
  if (evaluation.policy == "fsdp2") document["left_out"] = evaluation.left_out;
  return document;
}

}  // namespace

std::string plan_header(const Evaluation& evaluation, const shard::Hardware& hardware) {
  const StepPlan& plan = evaluation.plan;
  const config::Train& train = plan.config.train;
  const auto count = [](int64_t value) { return std::to_string(value); };
  std::string text =
      count(plan.layout->elements()) + " parameters in " + std::string(name_of(plan.config.precision.param)) +
      "; " + count(train.grad_accumulation) + " x " + count(train.micro_batch) + " x " +
      count(train.seq_len) + " tokens per rank and step\n" + hardware.name + ": " +
      counted(evaluation.world.ranks, "rank") + ", " +
      count(std::min(evaluation.world.ranks, evaluation.world.ranks_per_node)) + " per node\npolicy " +
      evaluation.policy + ": " +
      (plan.division.replicas == 1 ? "1 copy of the model on "
                                   : count(plan.division.replicas) + " copies of the model, each on ") +
      counted(plan.division.shards, "rank");
  if (evaluation.policy == "fsdp2") return text + "\n";
  return text + "; recompute " + plan.config.memory.recompute_summary() + "; logits of " +
         count(train.head_chunk) + " rows at a time\n" + slots_lines(plan);
}

std::string plan_table(std::span<const Evaluation* const> evaluations, const shard::Hardware& hardware) {
  std::string text;
  const auto row = [&](const std::string& name, const std::function<std::string(const Evaluation&)>& value) {
    text += format("  %-*s", kNameColumns, name.c_str());
    for (const Evaluation* evaluation : evaluations) text += pad(value(*evaluation), kValueColumns);
    text += "\n";
  };
  row("", [](const Evaluation& e) { return e.policy; });
  text += "memory, each purpose at its own peak\n";
  for (const shard::Purpose purpose : shard::kPurposes)
    row(name_of(purpose), [&](const Evaluation& e) { return megabytes(e.plan.memory.peak_bytes(purpose)); });
  row("peak", [](const Evaluation& e) { return megabytes(e.plan.memory.bytes); });
  row("available",
      [&](const Evaluation& e) { return megabytes(e.plan.config.memory.available(hardware.memory_bytes)); });
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
  return text + remarks(*evaluations.front(), *evaluations.back(), hardware);
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
                          {"recompute", evaluation.plan.config.memory.recompute_summary()},
                          {"cuda_graph", evaluation.plan.config.train.cuda_graph}};
  document["hardware"] = hardware.name;
  if (peer != nullptr) document["peer"] = numbers(*peer, hardware);
  return document.dump(2);
}

}  // namespace minillm::train
