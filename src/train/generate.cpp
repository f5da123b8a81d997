#include "train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "checkpoint/safetensors.h"
#include "config/config.h"
#include "core/error.h"
#include "core/philox.h"
#include "cuda/check.h"
#include "cuda/gemm.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "kernels/cast.h"
#include "kernels/split.h"
#include "model/parameters.h"
#include "model/transformer.h"
#include "shard/layout.h"
#include "train/weights_file.h"

namespace minillm::train {
namespace {

/// The tokens of a text. Throws UsageError for bytes that the model does not know.
std::vector<int32_t> tokens_of(const std::string& prompt, int64_t vocab_size) {
  std::vector<int32_t> tokens;
  for (const char c : prompt) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= vocab_size)
      throw UsageError("generate: byte " + std::to_string(tokens.size()) + " of the prompt has the value " +
                       std::to_string(byte) + "; the model's vocab_size is " + std::to_string(vocab_size) +
                       ", so values must be below it");
    tokens.push_back(byte);
  }
  return tokens;
}

void require_byte_model(const config::Model& model) {
  if (!model.causal)
    throw UsageError("generate: the model was trained with model.causal false, so it cannot continue a text");
  if (model.vocab_size > 256)
    throw UsageError("generate: the model's vocabulary has " + std::to_string(model.vocab_size) +
                     " tokens, but only byte vocabularies (at most 256) can be printed");
}

/// The forward pass on one device with all weights resident.
class Inference {
 public:
  Inference(const TrainedModel& trained, const checkpoint::SafetensorsReader& file)
      : model_(trained.model),
        window_(trained.sequence),
        dtype_(trained.precision),
        layout_(shard::make_layout(model::units(model_), 1)),
        transformer_(model_, {.batch = 1, .sequence = window_, .head_chunk = 1}, dtype_, layout_,
                     keep_nothing(model_)),
        blas_(workspace()) {
    allocate_buffers();
    load_weights(file);
  }

  int64_t window() const { return window_; }

  /// Logits of the token after `context`, which has 1 to window() tokens.
  std::vector<float> next_logits(std::span<const int32_t> context) {
    std::vector<int32_t> padded(static_cast<size_t>(window_), 0);  // a causal model does not look ahead
    std::ranges::copy(context, padded.begin());
    upload(addresses_[transformer_.tokens()], padded.data(), padded.size() * sizeof(int32_t));
    for (int unit = 0; unit < transformer_.head_unit(); ++unit)
      transformer_.compute(forward(unit), operands(unit), blas_, stream_.get());
    transformer_.logits_of(std::ssize(context) - 1, operands(transformer_.head_unit()), blas_, stream_.get());
    kernels::cast({.out = logits_.data(),
                   .in = addresses_[transformer_.logits()],
                   .count = model_.vocab_size,
                   .out_type = DType::kFp32,
                   .in_type = dtype_},
                  stream_.get());
    std::vector<float> logits(static_cast<size_t>(model_.vocab_size));
    cuda::check(cudaMemcpyAsync(logits.data(), logits_.data(), logits.size() * sizeof(float),
                                cudaMemcpyDeviceToHost, stream_.get()));
    stream_.synchronize();
    return logits;
  }

 private:
  // No backward pass follows, so all blocks can use the same memory.
  static model::Recomputation keep_nothing(const config::Model& model) {
    return {.blocks =
                std::vector<model::Recompute>(static_cast<size_t>(model.n_layers), model::Recompute::kBlock)};
  }

  static shard::Operation forward(int unit) { return {.kind = shard::OpKind::kForward, .unit = unit}; }

  // On the stream of the kernels, which the default stream is not ordered with; done on return.
  void upload(void* device, const void* host, size_t bytes) {
    cuda::check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_.get()));
    stream_.synchronize();
  }

  std::set<int> used_buffers() const {
    std::set<int> used;
    const auto add = [&](const shard::BufferUse& use) {
      used.insert(use.reads.begin(), use.reads.end());
      used.insert(use.writes.begin(), use.writes.end());
    };
    for (int unit = 0; unit < transformer_.head_unit(); ++unit) add(transformer_.uses(forward(unit)));
    add(transformer_.logits_uses());
    return used;
  }

  /// Before anything is allocated: the constructor comes here first.
  void require_memory() const {
    int64_t weights = 0, largest = 0, buffers = 0;
    for (const shard::UnitLayout& unit : layout_.units) {
      weights += unit.padded_elements * size_of(dtype_);
      largest = std::max(largest, unit.padded_elements * size_of(DType::kFp32));  // while it is loaded
    }
    for (const int index : used_buffers())
      buffers += transformer_.buffers()[static_cast<size_t>(index)].bytes;
    const int64_t bytes = weights + largest + buffers + cuda::BlasLt::workspace_bytes();
    const cuda::DeviceCapacity capacity = cuda::device_capacity();
    if (bytes > capacity.free)
      throw MemoryError("generate: a model with a window of " + std::to_string(window_) + " tokens needs " +
                        std::to_string(bytes) + " bytes, but only " + std::to_string(capacity.free) + " of " +
                        std::to_string(capacity.total) +
                        " are free. The window is the train.seq_len that the model was trained with");
  }

  std::byte* workspace() {
    require_memory();
    workspace_ = cuda::DeviceMemory(cuda::BlasLt::workspace_bytes());
    return workspace_.data();
  }

  void allocate_buffers() {
    const auto& specs = transformer_.buffers();
    buffers_.resize(specs.size());
    addresses_.resize(specs.size());
    for (const int index : used_buffers()) {
      const auto i = static_cast<size_t>(index);
      buffers_[i] = cuda::DeviceMemory(specs[i].bytes);
      addresses_[i] = buffers_[i].data();
    }
    logits_ = cuda::DeviceMemory(model_.vocab_size * static_cast<int64_t>(sizeof(float)));
    if (transformer_.rope_table() < 0) return;
    const std::vector<float2> table = transformer_.rope_table_values();
    upload(addresses_[transformer_.rope_table()], table.data(), table.size() * sizeof(float2));
  }

  void load_weights(const checkpoint::SafetensorsReader& file) {
    for (const shard::UnitLayout& unit : layout_.units) {
      std::vector<float> flat(static_cast<size_t>(unit.padded_elements), 0.0f);
      for (const shard::Slice& slice : unit.slices)
        file.read(
            file.find(slice.name), 0,
            std::span(flat).subspan(static_cast<size_t>(slice.offset), static_cast<size_t>(slice.elements)));
      const cuda::DeviceMemory master(std::ssize(flat) * static_cast<int64_t>(sizeof(float)));
      upload(master.data(), flat.data(), flat.size() * sizeof(float));
      weights_.emplace_back(unit.padded_elements * size_of(dtype_));
      round(master, unit.padded_elements);
      stream_.synchronize();
    }
  }

  /// To the compute type, as training rounds its masters.
  void round(const cuda::DeviceMemory& master, int64_t count) {
    const auto* in = reinterpret_cast<const float*>(master.data());
    if (dtype_ == DType::kFp32)
      return kernels::cast({.out = weights_.back().data(), .in = in, .count = count, .out_type = dtype_},
                           stream_.get());
    const cuda::DeviceMemory lower(count * static_cast<int64_t>(sizeof(uint16_t)));
    kernels::split({.upper = reinterpret_cast<uint16_t*>(weights_.back().data()),
                    .lower = reinterpret_cast<uint16_t*>(lower.data()),
                    .in = in,
                    .count = count},
                   stream_.get());
    stream_.synchronize();  // before `lower` is freed
  }

  shard::Operands operands(int unit) const {
    shard::Operands o;
    o.weights = weights_[static_cast<size_t>(unit)].data();
    o.buffers = addresses_.data();
    return o;
  }

  config::Model model_;
  int64_t window_;
  DType dtype_;
  shard::Layout layout_;
  model::Transformer transformer_;
  cuda::DeviceMemory workspace_, logits_;
  std::vector<cuda::DeviceMemory> buffers_, weights_;
  std::vector<std::byte*> addresses_;
  cuda::Stream stream_;
  cuda::BlasLt blas_;
};

/// Draws from softmax(logits / temperature) with a uniform number in [0, 1).
int32_t sample(const std::vector<float>& logits, double temperature, double uniform) {
  if (!std::ranges::all_of(logits, [](float logit) { return std::isfinite(logit); }))
    throw InputError("generate: the model computes logits that are not finite; its weights are no use");
  const auto best = std::ranges::max_element(logits);
  if (temperature == 0) return static_cast<int32_t>(best - logits.begin());
  std::vector<double> weights(logits.size());
  std::ranges::transform(logits, weights.begin(),
                         [&](float logit) { return std::exp((logit - *best) / temperature); });
  double rest = uniform * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t token = 0; token < weights.size(); ++token)
    if ((rest -= weights[token]) < 0) return static_cast<int32_t>(token);
  return static_cast<int32_t>(best - logits.begin());
}

}  // namespace

void generate(const GenerateOptions& options, std::ostream& out) {
  if (options.tokens < 1)
    throw UsageError("generate: --tokens is " + std::to_string(options.tokens) + ", allowed are 1 and more");
  if (!(options.temperature >= 0 && std::isfinite(options.temperature)))
    throw UsageError("generate: --temperature is " + std::to_string(options.temperature) +
                     ", allowed are 0 and more");
  const checkpoint::SafetensorsReader file(options.model);
  const TrainedModel trained = trained_model(file);
  require_byte_model(trained.model);
  std::vector<int32_t> text =
      tokens_of(options.prompt.empty() ? "\n" : options.prompt, trained.model.vocab_size);
  Inference inference(trained, file);

  out << options.prompt << std::flush;
  for (int64_t i = 0; i < options.tokens; ++i) {
    const int64_t length = std::min(std::ssize(text), inference.window());
    const std::vector<float> logits =
        inference.next_logits(std::span(text).last(static_cast<size_t>(length)));
    const PhiloxWords words = philox(static_cast<uint64_t>(options.seed), 0, static_cast<uint64_t>(i));
    text.push_back(sample(logits, options.temperature, uniform_from_bits(words.word[0])));
    out << static_cast<char>(text.back()) << std::flush;
  }
  out << std::endl;
}

}  // namespace minillm::train
