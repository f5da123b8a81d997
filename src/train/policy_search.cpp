#include "train/policy_search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/format.h"
#include "train/evaluation.h"
#include "train/memory_advice.h"

namespace minillm::train {
namespace {

using config::Config;
using config::Recompute;

constexpr double kHardlySlower = 1e-3;  // what a model of the hardware cannot tell apart
constexpr std::array kModes = {Recompute::kNone, Recompute::kCheap, Recompute::kBlock};

/// Group sizes of hybrid sharding: the node, and its halves and doubles, that divide the ranks.
std::vector<int> group_sizes(const World& world) {
  std::set<int> sizes;
  for (int size = world.ranks_per_node; size > 1; size /= 2) sizes.insert(size);
  for (int size = world.ranks_per_node; size < world.ranks && sizes.size() < 8; size *= 2) sizes.insert(size);
  std::vector<int> list;
  for (int size : sizes)
    if (size > 1 && size < world.ranks && world.ranks % size == 0) list.push_back(size);
  return list;
}

/// What --set takes to get a candidate of one recomputation and default slots.
std::string settings_text(const Config& config) {
  std::string text = "--set parallel.policy=" + config.parallel.policy;
  if (config.parallel.group_size > 0)
    text += " --set parallel.group_size=" + std::to_string(config.parallel.group_size);
  return text + " --set memory.recompute=" + name_of(config.memory.recompute.front());
}

int64_t rows_of(const Config& config) {
  return config.train.micro_batch * config.train.seq_len;
}

class Search {
 public:
  Search(const Config& config, const World& world, const shard::Hardware& hardware, int64_t bytes)
      : base_(config), world_(world), hardware_(hardware), bytes_(bytes) {}

  PolicySearch run() && {
    for (const Config& policy : policies())
      for (Recompute mode : kModes) {
        Config config = policy;
        config.memory.recompute = {mode};
        evaluate_candidate(config);
      }
    for (const Candidate& candidate : fastest(3)) try_whole_logits(try_slots(candidate));
    if (const auto found = best()) {
      Config config = candidates_[*found].config;
      mix_recomputation(config);
      // Logits may have taken the memory that a lighter recomputation could do more with.
      if (std::exchange(config.train.head_chunk, base_.train.head_chunk) != base_.train.head_chunk)
        mix_recomputation(config);
    }
    return result();
  }

 private:
  std::vector<Config> policies() const {
    std::vector<Config> list;
    const auto add = [&](const char* policy, int64_t group_size) {
      Config config = base_;
      config.parallel.policy = policy;
      config.parallel.group_size = group_size;
      config.parallel.hardware.clear();
      list.push_back(config);
    };
    add("full", 0);
    if (world_.ranks == 1) return list;
    add("grads", 0);
    if (base_.precision.reduce == DType::kFp32) add("replicate", 0);
    for (int size : group_sizes(world_)) add("hybrid", size);
    return list;
  }

  const Candidate& evaluate_candidate(const Config& config) {
    const Evaluation evaluation = evaluate(config, world_, hardware_);
    return candidates_.emplace_back(Candidate{.config = config,
                                              .head_chunk = evaluation.plan.config.train.head_chunk,
                                              .bytes = evaluation.plan.memory.bytes,
                                              .step_s = evaluation.timeline.step_s,
                                              .exposed_comm_s = evaluation.timeline.exposed_comm_s,
                                              .fits = evaluation.plan.memory.bytes <= bytes_});
  }

  // The index of the fastest that fits; of those that are hardly slower, the one that needs least memory.
  std::optional<size_t> best() const {
    const auto best_by = [&](auto key, double limit) {
      std::optional<size_t> found;
      for (size_t i = 0; i < candidates_.size(); ++i) {
        const Candidate& candidate = candidates_[i];
        if (candidate.fits && candidate.step_s <= limit &&
            (!found || key(candidate) < key(candidates_[*found])))
          found = i;
      }
      return found;
    };
    const auto fastest = best_by([](const Candidate& c) { return c.step_s; }, HUGE_VAL);
    if (!fastest) return fastest;
    return best_by([](const Candidate& c) { return c.bytes; },
                   candidates_[*fastest].step_s * (1 + kHardlySlower));
  }

  std::vector<Candidate> fastest(size_t count) const {
    std::vector<Candidate> fitting;
    for (const Candidate& candidate : candidates_)
      if (candidate.fits) fitting.push_back(candidate);
    std::ranges::stable_sort(fitting, {}, [](const Candidate& c) { return std::pair(c.step_s, c.bytes); });
    fitting.resize(std::min(count, fitting.size()));
    return fitting;
  }

  // One kind of slot after the other, as long as more of them help; the candidate with those that do.
  Candidate try_slots(Candidate found) {
    const std::string_view policy = found.config.parallel.policy;
    const int64_t blocks = found.config.model.n_layers;
    if (world_.ranks > 1 && (policy == "full" || policy == "hybrid"))
      found = climb(found, &config::Parallel::weight_slots, {3, 4, 6, 8, blocks});
    return climb(found, &config::Parallel::gradient_slots, {3, 4, 8, blocks + 2});
  }

  Candidate climb(Candidate found, int64_t config::Parallel::*slots, const std::set<int64_t>& counts) {
    const int64_t most = found.config.model.n_layers + 2;
    for (int64_t count : counts) {
      if (count > most || count <= found.config.parallel.*slots) continue;
      Config config = found.config;
      config.parallel.*slots = count;
      const Candidate& candidate = evaluate_candidate(config);
      if (!candidate.fits) break;
      if (candidate.step_s * (1 + kHardlySlower) < found.step_s) found = candidate;
    }
    return found;
  }

  // What the plan chooses by itself costs no memory. All logits do, but then the reduction of the head's
  // gradients hides behind a part of the head itself.
  void try_whole_logits(const Candidate& found) {
    Config config = found.config;
    const int64_t rows = rows_of(config);
    if (config.train.head_chunk > 0 || found.head_chunk >= rows) return;
    config.train.head_chunk = rows;
    evaluate_candidate(config);
  }

  // The first blocks live longest, so they are the ones that keep least.
  void mix_recomputation(const Config& found) {
    const Recompute mode = found.memory.recompute.front();
    if (found.memory.recompute.size() > 1 || mode == Recompute::kNone) return;
    const auto lighter = mode == Recompute::kBlock ? Recompute::kCheap : Recompute::kNone;
    const auto with = [&](int64_t heavy_blocks) {
      Config config = found;
      config.memory.recompute.assign(static_cast<size_t>(config.model.n_layers), lighter);
      std::fill_n(config.memory.recompute.begin(), heavy_blocks, mode);
      return config;
    };
    int64_t too_few = 0, enough = found.model.n_layers;
    while (enough - too_few > 1) {
      const int64_t middle = (too_few + enough) / 2;
      (evaluate_candidate(with(middle)).fits ? enough : too_few) = middle;
    }
  }

  PolicySearch result() const {
    return {.candidates = {candidates_.begin(), candidates_.end()}, .best = best()};
  }

  const Config& base_;
  const World& world_;
  const shard::Hardware& hardware_;
  int64_t bytes_;
  std::deque<Candidate> candidates_;
};

}  // namespace

std::string PolicySearch::table() const {
  std::string text = format("  %-10s %6s %8s %8s  %-20s %10s %9s %10s %10s\n", "policy", "group", "weights",
                            "grads", "recompute", "logits", "memory", "step", "exposed");
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& candidate = candidates[i];
    const config::Parallel& parallel = candidate.config.parallel;
    const auto slots = [](int64_t count) { return count == 0 ? std::string("-") : std::to_string(count); };
    const std::string logits = candidate.head_chunk >= rows_of(candidate.config)
                                   ? "all"
                                   : std::to_string(candidate.head_chunk) + " rows";
    text += format("%s %-10s %6s %8s %8s  %-20s %10s %6.2f GB %7.2f ms %7.2f ms%s\n", best == i ? ">" : " ",
                   parallel.policy.c_str(), slots(parallel.group_size).c_str(),
                   slots(parallel.weight_slots).c_str(), slots(parallel.gradient_slots).c_str(),
                   candidate.config.memory.recompute_summary().c_str(), logits.c_str(),
                   static_cast<double>(candidate.bytes) * 1e-9, candidate.step_s * 1e3,
                   candidate.exposed_comm_s * 1e3, candidate.fits ? "" : "  does not fit");
  }
  return text;
}

PolicySearch search_policy(const Config& config, const World& world, const shard::Hardware& hardware,
                           int64_t bytes) {
  return Search(config, world, hardware, bytes).run();
}

Config chosen_of(const PolicySearch& search, const World& world, int64_t bytes) {
  if (search.best) return search.candidates[*search.best].config;
  const Config& least = std::ranges::min_element(search.candidates, {}, &Candidate::bytes)->config;
  throw MemoryError("no policy fits " + std::to_string(bytes) + " bytes on each device.\n" + search.table() +
                    "The smallest is " + settings_text(least) + "; beside these settings:\n" +
                    advise_on_memory(least, world, bytes));
}

}  // namespace minillm::train
