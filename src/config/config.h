// The configuration of a run: JSON file plus --set overrides, validated into plain structs.
//
// Goals: one description of every key (config/schema.h) from which parsing, validation, `minillm config
// --describe` and the documentation are made; errors that name the key, the value, what is allowed and the
// nearest valid key. Non-goals: defaults that depend on the machine. The same file means the same training
// anywhere.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace minillm::config {

struct Model {
  int64_t vocab_size = 32000;
  int64_t dim = 2048;
  int64_t n_layers = 12;
  int64_t n_heads = 16;
  int64_t ffn_dim = 0;  ///< 0 in the file means 4 · dim; never 0 after loading
  bool causal = false;
  double rope_theta = 0;  ///< 0: no position encoding
  bool final_norm = false;
  double norm_eps = 1.1920928955078125e-07;  ///< the fp32 epsilon, PyTorch's default for RMSNorm
  std::string init =
      "pytorch";  ///< "pytorch" (its layers' default distributions) or the path of a .safetensors file

  int64_t head_size() const { return dim / n_heads; }
};

struct Optimizer {
  double lr = 3e-4, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
};

struct Train {
  int64_t steps = 100;
  int64_t stop_after = 0;         ///< end after so many steps of `steps`; 0: do not
  int64_t micro_batch = 8;        ///< sequences per rank at a time
  int64_t grad_accumulation = 1;  ///< micro-batches per step
  int64_t seq_len = 1024;
  int64_t seed = 0;
  double grad_clip = 0;     ///< largest gradient norm; 0: no clipping
  int64_t head_chunk = 0;   ///< rows of logits that exist at a time; 0: from the memory plan
  bool cuda_graph = false;  ///< the step is captured once and replayed
  Optimizer optimizer;
};

struct Parallel {
  std::string policy = "full";  ///< "full", "grads", "replicate", "hybrid" or "auto"
  int64_t group_size = 0;       ///< of "hybrid": consecutive ranks that share a model; 0: those of a node
  int64_t weight_slots = 0;     ///< 0: 2, with "grads" as many as blocks
  int64_t gradient_slots = 0;   ///< 0: 2
  bool reduce_every_micro_batch = true;
  std::string hardware;                      ///< of "auto": a name or a file; empty: by the device's name
  int64_t gather_ctas = 0, reduce_ctas = 0;  ///< most thread blocks of a collective; 0: NCCL's choice
  bool copy_engines = true;         ///< gathers by copy engines where the ranks of a model share a node
  double timeout_s = 600;           ///< a step that takes longer ends all ranks
  double startup_timeout_s = 1800;  ///< as does start-up without progress for so long
};

struct Precision {
  DType param = DType::kBf16;    ///< weights and activations in compute; masters are fp32
  DType reduce = DType::kFp32;   ///< gradients on the wire, among the ranks that share a model
  DType moments = DType::kFp32;  ///< of AdamW; bf16 with stochastic rounding
};

/// What a block keeps from forward to backward.
enum class Recompute : uint8_t {
  kNone,   ///< everything that the backward pass reads
  kCheap,  ///< all but the outputs of norms and activation functions, which are made again
  kBlock,  ///< its input; the backward pass runs the block forward again
};
const char* name_of(Recompute mode);  ///< "none", "cheap" or "block"

struct Memory {
  std::vector<Recompute> recompute = {Recompute::kCheap};  ///< of all blocks, or of each
  int64_t limit = 0;  ///< bytes of the plan at most; 0: what the device has free, less the reserve
  /// Bytes of a device that the plan leaves to others of this process. NCCL's buffers are some hundred MB for
  /// each of two or three communicators, kernels that load when they are first launched one or two hundred, a
  /// captured step some tens.
  int64_t reserve = 1'500'000'000;

  Recompute recompute_of(int64_t block) const {
    return recompute[recompute.size() == 1 ? 0 : static_cast<size_t>(block)];
  }
  /// `recompute` in a few words: "cheap", or by runs of blocks, "4x block, 8x cheap".
  std::string recompute_summary() const;
  /// What a plan may take of `device_bytes` of which nothing is in use yet.
  int64_t available(int64_t device_bytes) const {
    const int64_t rest = std::max(device_bytes - reserve, int64_t{0});
    return limit > 0 ? std::min(limit, rest) : rest;
  }
};

/// Which of cuBLASLt's algorithms compute the matrix products.
struct Gemm {
  bool deterministic = true;  ///< cuBLASLt's first candidate; false: the fastest, timed at the start
  std::string cache;          ///< file of timed choices; empty: none
  int64_t sm_limit = 0;       ///< multiprocessors that products are planned for; 0: all
};

struct Data {
  std::string source = "random";  ///< "random" tokens and targets, or "text": bytes of files
  std::string path;               ///< for "text": a file or a glob
};

struct Checkpoint {
  std::string dir;          ///< where model.safetensors is written after training; empty: nowhere
  double timeout_s = 3600;  ///< saving without progress for so long ends all ranks
};

struct Config {
  Model model;
  Train train;
  Parallel parallel;
  Precision precision;
  Memory memory;
  Gemm gemm;
  Data data;
  Checkpoint checkpoint;
};

/// Reads `path` (JSON object; missing keys take their defaults), applies `overrides` ("train.steps=20", the
/// value in JSON or a bare string) in order, validates. Throws InputError when the file cannot be read, is
/// not JSON (with line and column) or repeats a key, UsageError for keys and values.
Config load(const std::string& path, const std::vector<std::string>& overrides);

/// As load(), from JSON text; `name` stands for the path in errors.
Config parse(const std::string& text, const std::string& name, const std::vector<std::string>& overrides);

/// The resolved configuration as JSON with all keys, two spaces of indentation. parse(to_json(c)) gives c.
std::string to_json(const Config& config);
/// The `model` object alone, on one line: what a weights file carries to be readable on its own.
std::string model_to_json(const Model& model);
/// The inverse. Throws InputError, also for keys and values: they are a file's, not a user's.
Model model_from_json(const std::string& text, const std::string& name);

/// A key of a configuration with its value, as JSON text.
struct KeyValue {
  std::string key;
  std::string value;
  bool by_rank = false;  ///< a path, which ranks may spell differently
};
/// All of them, in the order of `describe()`.
std::vector<KeyValue> key_values(const Config& config);

/// Every key with type, default, allowed values and meaning, for people.
std::string describe();

}  // namespace minillm::config
