#include "train/memory_advice.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace minillm::train {
namespace {

/// A setting that saves memory.
struct Saving {
  std::string text;                            ///< as --set takes it
  std::function<bool(config::Config&)> apply;  ///< false: it is set already
};

template <class T>
bool change(T& member, const T& value) {
  if (member == value) return false;
  member = value;
  return true;
}

// From what costs nothing to what costs most: slots beyond two, weights and replicas that need not be kept,
// then computing again, then the precision of moments.
std::vector<Saving> savings(const config::Config& config, const World& world) {
  using config::Config;
  using config::Recompute;
  std::vector<Saving> list = {
      {"parallel.gradient_slots=0",
       [](Config& c) {
         return c.parallel.gradient_slots > 2 && change(c.parallel.gradient_slots, int64_t{0});
       }},
      {"parallel.weight_slots=0",
       [](Config& c) { return c.parallel.weight_slots > 2 && change(c.parallel.weight_slots, int64_t{0}); }},
      {"memory.recompute=cheap",
       [](Config& c) {
         return c.memory.recompute == std::vector{Recompute::kNone} &&
                change(c.memory.recompute, {Recompute::kCheap});
       }},
      {"parallel.reduce_every_micro_batch=true",
       [](Config& c) { return change(c.parallel.reduce_every_micro_batch, true); }}};
  if (world.ranks > 1)
    list.push_back({config.parallel.group_size > 0 ? "parallel.policy=full --set parallel.group_size=0"
                                                   : "parallel.policy=full",
                    [](Config& c) {
                      c.parallel.group_size = 0;
                      return change(c.parallel.policy, std::string("full"));
                    }});
  list.push_back(
      {"memory.recompute=block", [](Config& c) { return change(c.memory.recompute, {Recompute::kBlock}); }});
  list.push_back(
      {"parallel.gradient_slots=1", [](Config& c) { return change(c.parallel.gradient_slots, int64_t{1}); }});
  list.push_back(
      {"precision.moments=bf16", [](Config& c) { return change(c.precision.moments, DType::kBf16); }});
  return list;
}

bool fits(const config::Config& config, const World& world, int64_t bytes) {
  return make_step_plan(config, world).memory.bytes <= bytes;
}

// Each saving alone, in the order of their cost; then together, one more each time, and without those that
// turn out not to be needed.
std::string cheapest_settings(const config::Config& config, const World& world, int64_t bytes) {
  const std::vector<Saving> all = savings(config, world);
  for (const Saving& saving : all) {
    config::Config changed = config;
    if (saving.apply(changed) && fits(changed, world, bytes)) return "--set " + saving.text;
  }
  std::vector<const Saving*> used;
  const auto with_used = [&](const Saving* without) {
    config::Config changed = config;
    for (const Saving* saving : used)
      if (saving != without) saving->apply(changed);
    return changed;
  };
  config::Config changed = config;
  for (const Saving& saving : all) {
    if (!saving.apply(changed)) continue;
    used.push_back(&saving);
    if (!fits(changed, world, bytes)) continue;
    for (const Saving* candidate : std::vector(used))
      if (fits(with_used(candidate), world, bytes)) std::erase(used, candidate);
    std::string text;
    for (const Saving* saving_used : used) text += (text.empty() ? "--set " : " --set ") + saving_used->text;
    return text;
  }
  return "";
}

}  // namespace

std::string advise_on_memory(const config::Config& config, const World& world, int64_t bytes) {
  const int64_t micro_batch = largest_micro_batch(config, world, bytes);
  std::string advice = micro_batch > 0
                           ? "The largest train.micro_batch that fits is " + std::to_string(micro_batch) + "."
                           : "Not even train.micro_batch 1 fits.";
  const std::string settings = cheapest_settings(config, world, bytes);
  if (!settings.empty()) return advice + " As it is, it fits with " + settings + ".";
  return advice +
         " No setting makes it fit as it is: use more ranks, a shorter train.seq_len or a smaller model.";
}

void require_fit(const StepPlan& plan, const World& world, const cuda::DeviceCapacity& capacity) {
  const config::Memory& memory = plan.config.memory;
  const int64_t bytes = memory.available(capacity.free);
  if (plan.memory.bytes <= bytes) return;
  const auto count = [](int64_t value) { return std::to_string(value); };
  throw MemoryError("the plan needs " + count(plan.memory.bytes) + " bytes on each device, but " +
                    (memory.limit > 0 && bytes == memory.limit
                         ? "memory.limit is " + count(bytes)
                         : "only " + count(bytes) + " are there for it: " + count(capacity.free) + " of " +
                               count(capacity.total) + " are free, and memory.reserve leaves " +
                               count(memory.reserve) + " of them to NCCL, CUDA and a captured graph") +
                    ".\n" + plan.memory.table() + advise_on_memory(plan.config, world, bytes));
}

MemoryError reserve_too_small(const StepPlan& plan, const World& world, const std::string& refusal,
                              const cuda::DeviceCapacity& before, const cuda::DeviceCapacity& now) {
  // Where more is free than the plan needs it was refused for another reason, and less is a way out.
  const int64_t bytes = std::min(now.free, plan.memory.bytes - 1);
  return MemoryError(refusal + ".\nThe plan fitted at first: since then NCCL's communicators and CUDA took " +
                     std::to_string(before.free - now.free) + " bytes, and memory.reserve is " +
                     std::to_string(plan.config.memory.reserve) + ".\n" + plan.memory.table() +
                     advise_on_memory(plan.config, world, bytes));
}

}  // namespace minillm::train
