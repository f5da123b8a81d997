// The table of configuration keys: each with its member, what it allows and what it means. Loading, checking,
// printing and `minillm config --describe` are visitors of it; a new key is one line here and one member in
// config.h.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "config/config.h"

namespace minillm::config {

/// What a key allows. wanted() says it in words, the way errors and descriptions print it.
struct Integer {
  int64_t least;
  int64_t most = std::numeric_limits<int32_t>::max();
  std::string wanted() const;
  bool allows(int64_t value) const { return least <= value && value <= most; }
};
/// A real number of at least `least`; at most `most`, or below it when `most_excluded`. Infinities and NaN
/// never are.
struct Real {
  double least;
  double most;
  bool most_excluded = false;
  std::string wanted() const;
  bool allows(double value) const { return least <= value && (most_excluded ? value < most : value <= most); }
};
struct Boolean {
  std::string wanted() const { return "true or false"; }
  bool allows(bool) const { return true; }
};
struct Type {
  std::string wanted() const { return "\"bf16\" or \"fp32\""; }
  bool allows(DType) const { return true; }
};
/// One mode for all blocks, or a list with one for each.
struct RecomputeModes {
  std::string wanted() const { return "\"none\", \"cheap\", \"block\", or a list of them, one per block"; }
  bool allows(const std::vector<Recompute>& modes) const { return !modes.empty(); }
};
struct Text {
  std::string_view words = "a string";
  bool (*test)(std::string_view) = [](std::string_view) { return true; };
  /// A path on the machine of each rank: may be spelled differently there, but is set on all or on none. What
  /// it leads to is compared where it matters to more than one rank (train/agreement.h).
  bool by_rank = false;
  std::string wanted() const { return std::string(words); }
  bool allows(std::string_view value) const { return test(value); }
};

/// Whether ranks may differ in a key that allows this.
template <typename Allowed>
constexpr bool is_by_rank(const Allowed& allowed) {
  if constexpr (std::is_same_v<Allowed, Text>) return allowed.by_rank;
  return false;
}

/// fp32 has to hold the reals that go to the device: bounds that stay clear of its overflow and of its zero.
inline constexpr double kTiny = 1e-30, kHuge = 1e30;

inline bool is_initializer(std::string_view value) {
  return value == "pytorch" || value.ends_with(".safetensors");
}
inline bool is_source(std::string_view value) {
  return value == "random" || value == "text";
}

inline bool is_policy(std::string_view value) {
  return value == "full" || value == "grads" || value == "replicate" || value == "hybrid" || value == "auto";
}

/// Rows of the head's weight are counted in 32 bits, zero rows up to a multiple of 64 included.
inline constexpr int64_t kMostTokens = (int64_t{1} << 31) - 64;
/// The step is a list of operations that is made, planned and simulated as a whole: some for each block and
/// micro-batch. This many take seconds and half a gigabyte. With kMostBlocks any model has less than 2^56
/// parameters, whose fp32 masters, moments and gradients have less than 2^60 bytes.
inline constexpr int64_t kMostBlocks = 1024, kMostMicroBatches = 4096, kMostBlockPasses = 1 << 15;
inline constexpr int64_t kMostHeadChunks = 1 << 21;  ///< as many as the default makes of the most tokens
/// What train.seq_len allows, also where a weights file tells it.
inline constexpr Integer kSequenceLengths{1, 1 << 24};

/// Calls key(path, member, allowed, meaning) for every key below `model`. The model may be const.
template <typename ModelT, typename Key>
void for_each_model_key(ModelT&& model, Key&& key) {
  key("model.vocab_size", model.vocab_size, Integer{1, kMostTokens}, "number of different tokens");
  key("model.dim", model.dim, Integer{8, 1 << 20}, "width of the residual stream; a multiple of 8 * n_heads");
  key("model.n_layers", model.n_layers, Integer{1, kMostBlocks}, "number of blocks");
  key("model.n_heads", model.n_heads, Integer{1, 1 << 17},
      "attention heads of a block; dim / n_heads is a multiple of 8, at most 128");
  key("model.ffn_dim", model.ffn_dim, Integer{0, 1 << 24}, "width inside the feed-forward part; 0: 4 * dim");
  key("model.causal", model.causal, Boolean{}, "a token attends to itself and earlier tokens only");
  key("model.rope_theta", model.rope_theta, Real{0, kHuge},
      "base of the rotary position encoding, usually 10000; 0: no position encoding");
  key("model.final_norm", model.final_norm, Boolean{}, "RMSNorm between the last block and the head");
  key("model.norm_eps", model.norm_eps, Real{kTiny, 1}, "added to the mean square in RMSNorm");
  key("model.init", model.init, Text{"\"pytorch\" or the path of a .safetensors file", is_initializer, true},
      "initial weights: the default distributions of PyTorch's layers, or a file's");
}

/// Calls key(path, member, allowed, meaning) for every key, in the order in which they are printed.
template <typename ConfigT, typename Key>
void for_each_key(ConfigT&& config, Key&& key) {
  for_each_model_key(config.model, key);

  auto& train = config.train;
  key("train.steps", train.steps, Integer{1}, "optimizer steps");
  key("train.stop_after", train.stop_after, Integer{0}, "end after so many of the steps; 0: after all");
  key("train.micro_batch", train.micro_batch, Integer{1, 1 << 24}, "sequences per rank at a time");
  key("train.grad_accumulation", train.grad_accumulation, Integer{1, kMostMicroBatches},
      "micro-batches per rank and optimizer step, at most 32768 / n_layers; the loss is the mean over the "
      "valid targets of them all");
  key("train.seq_len", train.seq_len, kSequenceLengths, "tokens of a sequence");
  key("train.seed", train.seed, Integer{0, std::numeric_limits<int64_t>::max()},
      "of the initial weights and of the order of the data");
  key("train.grad_clip", train.grad_clip, Real{0, kHuge}, "largest norm of the gradient; 0: no clipping");
  key("train.head_chunk", train.head_chunk, Integer{0},
      "rows of logits that exist at a time; 0: 1024, or as many more as need no more memory than those, or "
      "all where parallel.policy auto finds that faster");

  key("train.cuda_graph", train.cuda_graph, Boolean{},
      "the step is captured once as a CUDA graph, collectives included, and replayed");

  auto& optimizer = train.optimizer;
  key("train.optimizer.lr", optimizer.lr, Real{0, kHuge}, "learning rate of AdamW");
  key("train.optimizer.beta1", optimizer.beta1, Real{0, 1, true}, "decay of the mean of gradients");
  key("train.optimizer.beta2", optimizer.beta2, Real{0, 1, true}, "decay of the mean of squared gradients");
  key("train.optimizer.eps", optimizer.eps, Real{kTiny, kHuge}, "added to the root of the mean square");
  key("train.optimizer.weight_decay", optimizer.weight_decay, Real{0, kHuge},
      "decoupled, of every parameter");

  auto& parallel = config.parallel;
  key("parallel.policy", parallel.policy,
      Text{"\"full\", \"grads\", \"replicate\", \"hybrid\" or \"auto\"", is_policy},
      "full: weights, gradients and optimizer state are sharded over all ranks (ZeRO-3); grads: the same, "
      "but "
      "weights are kept from forward to backward (ZeRO-2); replicate: every rank has everything (DDP); "
      "hybrid: "
      "sharded within groups of parallel.group_size ranks, replicated across them; auto: the fastest of "
      "them, "
      "with the fastest slots and recomputation, on the model of parallel.hardware within the memory there "
      "is");
  key("parallel.group_size", parallel.group_size, Integer{0, 1 << 20},
      "of hybrid: consecutive ranks that share one copy of the model; 0: the ranks of a node");
  key("parallel.weight_slots", parallel.weight_slots, Integer{0, 1 << 16},
      "blocks whose gathered weights exist at a time, at least 2; 0: 2, with grads all blocks");
  key("parallel.gradient_slots", parallel.gradient_slots, Integer{0, 1 << 16},
      "units whose full gradients exist at a time; 0: 2");
  key("parallel.reduce_every_micro_batch", parallel.reduce_every_micro_batch, Boolean{},
      "gradients of each micro-batch are reduced and added in fp32 shards; false: full gradients of all "
      "units "
      "are kept, added, and reduced once per step");
  key("parallel.hardware", parallel.hardware, Text{.words = "a string: a name or a file", .by_rank = true},
      "what auto takes the times from: a name that `minillm plan --help` lists, or a file as `minillm bench "
      "--json` writes it; empty: by the name of the device");
  key("parallel.gather_ctas", parallel.gather_ctas, Integer{0, 64},
      "most thread blocks that a gather may take from compute; 0: NCCL chooses");
  key("parallel.reduce_ctas", parallel.reduce_ctas, Integer{0, 64},
      "most thread blocks that a reduction may take from compute; 0: NCCL chooses");
  key("parallel.copy_engines", parallel.copy_engines, Boolean{},
      "gathers run on copy engines instead of multiprocessors, where all ranks that share a model are in one "
      "node; not with train.cuda_graph, whose first step is not captured");
  key("parallel.timeout_s", parallel.timeout_s, Real{1, 1e9},
      "a step that takes longer (seconds) ends all ranks");
  key("parallel.startup_timeout_s", parallel.startup_timeout_s, Real{1, 1e9},
      "start-up that makes no progress for so long (seconds) ends all ranks: reading data and initial "
      "values, "
      "making communicators, timing matrix products; the first step may take this and parallel.timeout_s");

  key("precision.param", config.precision.param, Type{},
      "of weights and activations in compute; master weights are fp32");
  key("precision.reduce", config.precision.reduce, Type{},
      "of gradients on the wire, among the ranks that share a model; sums of shards and replicas are fp32");

  key("precision.moments", config.precision.moments, Type{},
      "of AdamW's two moments; bf16 is rounded stochastically and saves 4 bytes per parameter");

  key("memory.recompute", config.memory.recompute, RecomputeModes{},
      "what is computed again in the backward pass: nothing; what costs little (norms, activation "
      "functions); or "
      "blocks from their input");
  key("memory.limit", config.memory.limit, Integer{0, std::numeric_limits<int64_t>::max()},
      "bytes that the plan may take on a device; 0: what is free, less memory.reserve");
  key("memory.reserve", config.memory.reserve, Integer{0, std::numeric_limits<int64_t>::max()},
      "bytes of a device's free memory that the plan leaves to what NCCL, the CUDA runtime and a captured "
      "graph "
      "take on top of it");

  auto& gemm = config.gemm;
  key("gemm.deterministic", gemm.deterministic, Boolean{},
      "matrix products use cuBLASLt's first candidate, so that equal runs give equal bits; false: rank 0 "
      "times up to 16 candidates per shape before the first step and all ranks use the fastest, which may be "
      "another one in the next run unless gemm.cache keeps it");
  key("gemm.cache", gemm.cache, Text{.words = "a string: a file", .by_rank = true},
      "JSON file that timed choices are read from and added to, which makes runs repeatable on equal GPUs, "
      "drivers and cuBLASLt; needs gemm.deterministic false; empty: choices are made anew in every run");
  key("gemm.sm_limit", gemm.sm_limit, Integer{0, 1 << 16},
      "multiprocessors that matrix products are planned for, to leave the others to collectives; 0 or more "
      "than there are: all");

  key("data.source", config.data.source, Text{"\"random\" or \"text\"", is_source},
      "random tokens and targets, or the bytes of files");
  key("data.path", config.data.path, Text{.words = "a string: a file or a glob", .by_rank = true},
      "what \"text\" reads: a file or a glob");

  key("checkpoint.dir", config.checkpoint.dir, Text{.words = "a string: a folder", .by_rank = true},
      "where model.safetensors is written after training; empty: nowhere");
  key("checkpoint.timeout_s", config.checkpoint.timeout_s, Real{1, 1e9},
      "saving that makes no progress for so long (seconds) ends all ranks");
}

/// Rules between keys. Throws UsageError naming them, `name` (the file) and the values.
void check_model(const Model& model, const std::string& name);
void check_config(const Config& config, const std::string& name);

}  // namespace minillm::config
