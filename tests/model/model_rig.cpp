#include "tests/model/model_rig.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>

#include "core/checked.h"
#include "cuda/check.h"
#include "kernels/cross_entropy.h"
#include "model/parameters.h"
#include "tests/device/bits.h"

namespace minillm::model::test {
namespace {

using shard::Operation;
using shard::OpKind;

void upload(const cuda::DeviceMemory& memory, std::span<const std::byte> bytes) {
  cuda::check(cudaMemcpy(memory.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  cuda::check(cudaDeviceSynchronize());  // streams do not wait for the default one
}

Bytes download(const cuda::DeviceMemory& memory) {
  Bytes bytes(static_cast<size_t>(memory.bytes()));
  cuda::check(cudaMemcpy(bytes.data(), memory.data(), bytes.size(), cudaMemcpyDeviceToHost));
  return bytes;
}

void fill(const cuda::DeviceMemory& memory) {
  cuda::check(cudaMemset(memory.data(), 0xFF, static_cast<size_t>(memory.bytes())));
  cuda::check(cudaDeviceSynchronize());
}

template <class T>
std::vector<T> values_of(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Values of ordinary size: norm weights about 1, all else small enough for activations of about 1.
std::vector<float> weight_values(const shard::UnitLayout& unit, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(unit.padded_elements), 0.0f);
  for (const shard::Slice& slice : unit.slices) {
    const bool norm = slice.name.find("norm") != std::string::npos;
    const float scale = slice.name.starts_with("embedding") ? 1.0f : 0.2f;
    for (int64_t i = 0; i < slice.elements; ++i)
      values[static_cast<size_t>(slice.offset + i)] = (norm ? 1.0f : 0.0f) + scale * normal(random);
  }
  return values;
}

Bytes stored(const std::vector<float>& values, DType type) {
  Bytes bytes(values.size() * static_cast<size_t>(size_of(type)));
  if (type == DType::kFp32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  std::vector<uint16_t> rounded(values.size());
  std::ranges::transform(values, rounded.begin(), minillm::test::nearest_bf16);
  std::memcpy(bytes.data(), rounded.data(), bytes.size());
  return bytes;
}

/// Ids of the variant's micro-batches. Few different ones, so that tokens repeat.
std::vector<int32_t> ids(const Variant& variant, uint32_t seed, int64_t vocabulary) {
  std::vector<int32_t> all;
  for (int64_t m = variant.first_micro_batch; m < variant.first_micro_batch + variant.micro_batches; ++m) {
    std::mt19937 random(seed + static_cast<uint32_t>(m));
    for (int64_t i = 0; i < kRows; ++i)
      all.push_back(static_cast<int32_t>(random() % 20 * 7 % static_cast<uint32_t>(vocabulary)));
  }
  return all;
}

std::vector<int32_t> targets(const Variant& variant, int64_t vocabulary) {
  std::vector<int32_t> all = ids(variant, 200, vocabulary);
  for (size_t i = 0; i < all.size(); ++i) {
    const int64_t m = variant.first_micro_batch + static_cast<int64_t>(i) / kRows;
    if (i % size_t{kRows} % 5 == 3 || m == variant.ignored_micro_batch) all[i] = kernels::kIgnoreTarget;
  }
  return all;
}

config::Model model_of(const Variant& variant) {
  config::Model model = small_model(variant.rope_and_final_norm);
  model.vocab_size = variant.vocabulary;
  return model;
}

Bytes poisoned_gradients(const shard::UnitLayout& unit) {
  Bytes bytes(static_cast<size_t>(unit.padded_elements) * sizeof(float), std::byte{0});
  for (const shard::Slice& slice : unit.slices)
    std::fill_n(bytes.begin() + slice.offset * int64_t{sizeof(float)},
                slice.elements * int64_t{sizeof(float)}, std::byte{0xFF});
  return bytes;
}

}  // namespace

config::Model small_model(bool rope_and_final_norm) {
  config::Model model{.vocab_size = 53, .dim = 40, .n_layers = 2, .n_heads = 5, .ffn_dim = 136};
  model.causal = rope_and_final_norm;
  model.rope_theta = rope_and_final_norm ? 10000 : 0;
  model.final_norm = rope_and_final_norm;
  return model;
}

ModelRig::ModelRig(const Variant& variant, float valid_count)
    : variant_(variant),
      model_(model_of(variant)),
      layout_(shard::make_layout(units(model_), 2)),
      transformer_(model_,
                   {.batch = kBatch,
                    .sequence = kSequence,
                    .head_chunk = variant.head_chunk,
                    .micro_batches = variant.micro_batches},
                   variant.dtype, layout_, variant.recomputation),
      workspace_(cuda::BlasLt::workspace_bytes()),
      valid_count_(sizeof(float)),
      loss_sums_(variant.micro_batches * static_cast<int64_t>(sizeof(float))) {
  uint32_t seed = 1;
  for (const shard::UnitLayout& unit : layout_.units) {
    weights_.emplace_back(unit.padded_elements * size_of(variant.dtype));
    weight_values_.push_back(weight_values(unit, seed++));
    upload(weights_.back(), stored(weight_values_.back(), variant.dtype));
    const Bytes gradients = poisoned_gradients(unit);
    gradients_.emplace_back(std::ssize(gradients));
    upload(gradients_.back(), gradients);
  }
  for (const shard::BufferSpec& spec : transformer_.buffers()) {
    buffers_.emplace_back(spec.bytes);
    addresses_.push_back(buffers_.back().data());
    fill(buffers_.back());
  }
  fill(loss_sums_);
  upload(valid_count_, std::as_bytes(std::span(&valid_count, 1)));
  const auto upload_to = [&](int index, const auto& values) {
    upload(buffers_[static_cast<size_t>(index)], std::as_bytes(std::span(values)));
  };
  upload_to(transformer_.tokens(), ids(variant, 100, model_.vocab_size));
  upload_to(transformer_.targets(), targets(variant, model_.vocab_size));
  if (transformer_.rope_table() >= 0) upload_to(transformer_.rope_table(), transformer_.rope_table_values());
}

int ModelRig::buffer(const std::string& name) const {
  const auto& specs = transformer_.buffers();
  const auto found = std::ranges::find(specs, name, &shard::BufferSpec::name);
  if (found == specs.end()) throw std::logic_error("no buffer is named " + name);
  return static_cast<int>(found - specs.begin());
}

shard::Operands ModelRig::operands(const Operation& operation) const {
  const auto unit = static_cast<size_t>(operation.unit);
  shard::Operands o;
  o.buffers = addresses_.data();
  o.weights = weights_[unit].data();
  const auto floats = [](const cuda::DeviceMemory& memory) {
    return reinterpret_cast<float*>(memory.data());
  };
  const bool none = operation.kind == OpKind::kBackwardInput && operation.segment < 0 &&
                    operation.unit == transformer_.head_unit();
  if (shard::makes_gradients(operation.kind) && !none) o.gradients = floats(gradients_[unit]);
  if (operation.kind == OpKind::kHeadLoss) {
    o.valid_count = floats(valid_count_);
    o.loss_sum = floats(loss_sums_) + operation.micro_batch;
  }
  return o;
}

std::vector<cuda::GemmKey> ModelRig::run(const Operation& operation) {
  cuda::BlasLt blas(workspace_.data());
  transformer_.compute(operation, operands(operation), blas, stream_.get());
  stream_.synchronize();
  return blas.shapes();
}

void ModelRig::set_weights(int unit, const std::vector<float>& values) {
  weight_values_[static_cast<size_t>(unit)] = values;
  upload(weights_[static_cast<size_t>(unit)], stored(values, variant_.dtype));
}

Bytes ModelRig::logits_of(int64_t row) {
  cuda::BlasLt blas(workspace_.data());
  const Operation forward{.kind = OpKind::kForward, .unit = transformer_.head_unit()};
  transformer_.logits_of(row, operands(forward), blas, stream_.get());
  stream_.synchronize();
  Bytes logits = download(buffers_[static_cast<size_t>(transformer_.logits())]);
  logits.resize(static_cast<size_t>(model_.vocab_size * size_of(variant_.dtype)));
  return logits;
}

State ModelRig::save() const {
  State state;
  for (const cuda::DeviceMemory& memory : buffers_) state.buffers.push_back(download(memory));
  for (const cuda::DeviceMemory& memory : gradients_) state.gradients.push_back(download(memory));
  state.loss_sums = download(loss_sums_);
  return state;
}

void ModelRig::restore(const State& state) {
  for (size_t i = 0; i < buffers_.size(); ++i) upload(buffers_[i], state.buffers[i]);
  for (size_t i = 0; i < gradients_.size(); ++i) upload(gradients_[i], state.gradients[i]);
  upload(loss_sums_, state.loss_sums);
}

void ModelRig::poison(int buffer) {
  fill(buffers_[static_cast<size_t>(buffer)]);
}

std::vector<float> ModelRig::gradients(int unit) const {
  return values_of<float>(download(gradients_[static_cast<size_t>(unit)]));
}

std::vector<float> ModelRig::loss_sums() const {
  return values_of<float>(download(loss_sums_));
}

std::vector<float> ModelRig::gradient(int unit, const std::string& suffix) const {
  for (const shard::Slice& slice : layout_.units[static_cast<size_t>(unit)].slices) {
    if (!slice.name.ends_with(suffix)) continue;
    const std::vector<float> all = gradients(unit);
    return {all.begin() + slice.offset, all.begin() + slice.offset + slice.elements};
  }
  throw std::logic_error("no tensor of the unit is named " + suffix);
}

std::vector<Operation> micro_batch(const ModelRig& rig, bool split, int micro_batch, bool accumulate) {
  std::vector<Operation> operations;
  const auto add = [&](OpKind kind, int unit, int segment = -1) {
    operations.push_back({.kind = kind,
                          .unit = unit,
                          .segment = segment,
                          .micro_batch = micro_batch,
                          .accumulate = accumulate && shard::makes_gradients(kind)});
  };
  const std::vector<Recompute>& recompute = rig.variant().recomputation.blocks;
  const int head = rig.transformer().head_unit();
  for (int unit = 0; unit < head; ++unit) add(OpKind::kForward, unit);
  const bool splits_head = split && rig.transformer().splits_head();
  add(OpKind::kHeadLoss, head, splits_head ? rig.transformer().projection_segment() : -1);
  if (splits_head) add(OpKind::kBackwardInput, head, rig.transformer().projection_segment() - 1);
  for (int unit = head - 1; unit > 0; --unit) {
    if (!recompute.empty() && recompute[static_cast<size_t>(unit - 1)] == Recompute::kBlock)
      add(OpKind::kRecompute, unit);
    add(split ? OpKind::kBackwardInput : OpKind::kBackward, unit);
  }
  add(OpKind::kBackward, 0);
  for (int unit = 1; split && unit < head; ++unit)
    for (const int segment : {kFeedForward, kAttentionInput, kAttentionOutput})
      add(OpKind::kBackwardWeight, unit, segment);
  return operations;
}

void run_all(ModelRig& rig, const std::vector<Operation>& operations) {
  for (const Operation& operation : operations) rig.run(operation);
}

}  // namespace minillm::model::test
