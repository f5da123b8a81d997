#include "config/schema.h"

#include <algorithm>
#include <charconv>

#include "core/checked.h"
#include "core/error.h"

namespace minillm::config {
namespace {

std::string shortest(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

/// `value` for a member named `path`, as in "model.dim (100)".
std::string named(const char* path, int64_t value) {
  return std::string(path) + " (" + std::to_string(value) + ")";
}

void require(bool holds, const std::string& name, const std::string& otherwise) {
  if (!holds) throw UsageError(name + ": " + otherwise);
}

// Settings of the policy that mean nothing together, or of which one would be ignored.
void check_parallel(const Config& config, const std::string& name) {
  const Parallel& parallel = config.parallel;
  const std::string policy = "parallel.policy (\"" + parallel.policy + "\")";
  const bool automatic = parallel.policy == "auto", replicate = parallel.policy == "replicate";
  const auto only_with = [&](bool holds, const std::string& key, const std::string& why) {
    require(holds, name, key + " does not go with " + policy + ": " + why);
  };
  only_with(parallel.group_size == 0 || parallel.policy == "hybrid",
            named("parallel.group_size", parallel.group_size), "only \"hybrid\" has groups; leave it at 0");
  only_with(parallel.weight_slots == 0 || parallel.policy == "full" || parallel.policy == "hybrid",
            named("parallel.weight_slots", parallel.weight_slots),
            replicate ? "weights are not gathered; leave it at 0" : "it decides itself; leave it at 0");
  require(parallel.weight_slots != 1, name,
          named("parallel.weight_slots", parallel.weight_slots) +
              " is too few: one block is gathered while another computes; use 2 or more, or 0");
  only_with(parallel.gradient_slots == 0 || !automatic,
            named("parallel.gradient_slots", parallel.gradient_slots), "it decides itself; leave it at 0");
  only_with(parallel.hardware.empty() || automatic, "parallel.hardware (\"" + parallel.hardware + "\")",
            "only \"auto\" uses it; leave it empty");
  only_with(config.precision.reduce == DType::kFp32 || !replicate, "precision.reduce (\"bf16\")",
            "gradients of replicas are summed in fp32; use \"fp32\"");
  require(parallel.reduce_every_micro_batch || config.train.grad_accumulation > 1, name,
          "parallel.reduce_every_micro_batch (false) does not go with " +
              named("train.grad_accumulation", config.train.grad_accumulation) +
              ": with one micro-batch there is one reduction; use true");
  const size_t modes = config.memory.recompute.size();
  require(modes == 1 || static_cast<int64_t>(modes) == config.model.n_layers, name,
          "memory.recompute lists " + std::to_string(modes) + " modes, but " +
              named("model.n_layers", config.model.n_layers) + " blocks need one each");
  only_with(!automatic || config.memory.recompute == Memory{}.recompute, "memory.recompute",
            "it decides itself; leave it at \"cheap\"");
}

/// Bytes and operations are counted in 63 bits. In floating point, because the exact numbers may not exist;
/// generous, because all that this has to let through is what could run.
void check_counts(const Config& config, const std::string& name) {
  const Model& model = config.model;
  const double tokens = config.train.micro_batch * config.train.seq_len, dim = model.dim, ffn = model.ffn_dim,
               vocab = model.vocab_size, sequence = config.train.seq_len;
  const std::string reduce = ". Reduce " + named("train.micro_batch", config.train.micro_batch) + ", " +
                             named("train.seq_len", config.train.seq_len) + ", or the model";
  constexpr double kMost = int64_t{1} << 62;
  const double bytes = 4 * tokens * (model.n_layers * (32 * dim + 8 * ffn) + 8 * vocab);
  require(bytes <= kMost, name,
          "activations of up to " + shortest(bytes) + " bytes; at most 2^62 can be counted" + reduce);
  const double operations = 4 * tokens * dim * (vocab + 4 * dim + 2 * ffn + 5 * sequence);
  require(operations <= kMost, name,
          "passes of up to " + shortest(operations) + " operations; at most 2^62 can be counted" + reduce);
}

void check_lengths(const Config& config, const std::string& name) {
  const Train& train = config.train;
  const int64_t tokens = train.micro_batch * train.seq_len;
  require(tokens <= std::numeric_limits<int32_t>::max(), name,
          named("train.micro_batch", train.micro_batch) + " * " + named("train.seq_len", train.seq_len) +
              " = " + std::to_string(tokens) + " tokens; at most 2147483647 per rank at a time");
  const int64_t passes = config.model.n_layers * train.grad_accumulation;
  require(passes <= kMostBlockPasses, name,
          named("model.n_layers", config.model.n_layers) + " * " +
              named("train.grad_accumulation", train.grad_accumulation) + " = " + std::to_string(passes) +
              " passes through a block; a step has at most " + std::to_string(kMostBlockPasses) +
              ". Reduce one of them; fewer, larger micro-batches make the same step");
  require(train.head_chunk == 0 || ceil_div(tokens, train.head_chunk) <= kMostHeadChunks, name,
          named("train.head_chunk", train.head_chunk) + " makes " +
              std::to_string(ceil_div(tokens, std::max<int64_t>(train.head_chunk, 1))) + " chunks of the " +
              std::to_string(tokens) + " tokens of a micro-batch; at most " +
              std::to_string(kMostHeadChunks) + ". Increase it, or leave it at 0");
}

}  // namespace

std::string Integer::wanted() const {
  return "an integer from " + std::to_string(least) + " to " + std::to_string(most);
}

std::string Real::wanted() const {
  return "a number of at least " + shortest(least) + (most_excluded ? " and below " : " and at most ") +
         shortest(most);
}

void check_model(const Model& model, const std::string& name) {
  const std::string dim = named("model.dim", model.dim), heads = named("model.n_heads", model.n_heads);
  require(model.dim % model.n_heads == 0, name, dim + " is not a multiple of " + heads);
  constexpr int64_t kHeadSizeStep = 8, kLargestHeadSize = 128;  // of the attention kernels
  require(model.head_size() % kHeadSizeStep == 0 && model.head_size() <= kLargestHeadSize, name,
          "the head size " + dim + " / " + heads + " = " + std::to_string(model.head_size()) +
              " is not allowed; it must be a multiple of 8, at most 128");
}

void check_config(const Config& config, const std::string& name) {
  check_model(config.model, name);
  check_lengths(config, name);
  check_counts(config, name);
  check_parallel(config, name);
  require(config.data.source != "text" || !config.data.path.empty(), name,
          "data.source is \"text\" but data.path is empty; name a file or a glob, e.g. \"corpus/*.txt\"");
  require(config.gemm.cache.empty() || !config.gemm.deterministic, name,
          "gemm.cache (\"" + config.gemm.cache +
              "\") holds timed choices, which gemm.deterministic (true) does not use; set "
              "gemm.deterministic=false, or leave gemm.cache empty");
}

}  // namespace minillm::config
