// The memory of a decoder as tests of the plan see it: the buffers of a transformer trainer, with real sizes
// and accesses, and no work.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "fixtures.h"

namespace minillm::shard {

struct ModelShape {
  int blocks = 12;
  int64_t rows = 8 * 1024;  // batch × sequence
  int64_t dim = 2048;
  int64_t ffn = 8192;
  int64_t heads = 16;
  int64_t vocabulary = 32000;
};

inline std::vector<UnitSpec> model_units(const ModelShape& shape) {
  const int64_t dim = shape.dim, ffn = shape.ffn;
  std::vector<UnitSpec> units;
  units.push_back({"embedding", {{"table", {shape.vocabulary, dim}}}, 1});
  for (int i = 0; i < shape.blocks; ++i) {
    const std::vector<TensorSpec> tensors = {{"norm1", {dim}, 0, 0},    {"qkv", {3 * dim, dim}, 0, 0},
                                             {"out", {dim, dim}, 0, 1}, {"norm2", {dim}, 0, 1},
                                             {"up", {ffn, dim}, 0, 2},  {"down", {dim, ffn}, 0, 3}};
    units.push_back({numbered("block", i), tensors, 0});
  }
  units.push_back({"head", {{"weight", {shape.vocabulary, dim}}}, 1});
  return units;
}

/// What a pass keeps for a later one is saved; what it needs for itself is scratch, named per operation.
class ModelProgram : public Program {
 public:
  explicit ModelProgram(const ModelShape& shape) : shape_(shape), blocks_(static_cast<size_t>(shape.blocks)) {
    const int64_t rows = shape.rows, residual = rows * shape.dim * 2;
    tokens_ = add("tokens", rows * 4, Purpose::kInputs);
    targets_ = add("targets", rows * 4, Purpose::kInputs);
    for (int i = 0; i < shape.blocks; ++i) add_block(blocks_[static_cast<size_t>(i)], numbered("block", i));
    head_input_ = add("head input", residual, Purpose::kActivations);
    d_residual_ = add("residual gradient", residual, Purpose::kActivations);
    logits_ = add("logits", rows * shape.vocabulary * 2, Purpose::kScratch);
    losses_ = add("losses", rows * 4, Purpose::kScratch);
    embedding_scratch_ = add("embedding scratch", rows * 12, Purpose::kScratch);
  }

  const std::vector<BufferSpec>& buffers() const override { return specs_; }
  std::vector<KernelWork> work(const Operation&) const override { return {}; }
  void compute(const Operation&, const Operands&, cudaStream_t) override {
    throw std::logic_error("ModelProgram computes nothing");
  }

  BufferUse uses(const Operation& operation) const override {
    switch (operation.kind) {
      case OpKind::kUpload:
        return {{}, {tokens_, targets_}};
      case OpKind::kBegin:
        return {{targets_}, {}};
      case OpKind::kHeadLoss:
        return operation.segment < 0 ? BufferUse{{head_input_, targets_}, {logits_, losses_, d_residual_}}
                                     : BufferUse{{head_input_, targets_}, {logits_, losses_}};
      case OpKind::kForward:
        return operation.unit == 0 ? BufferUse{{tokens_}, {input_of(1)}} : forward(operation.unit);
      case OpKind::kRecompute:
        return recompute(operation.unit);
      case OpKind::kBackward:
      case OpKind::kBackwardInput:
        if (operation.unit == shape_.blocks + 1) return {{logits_}, {d_residual_}};
        return operation.unit == 0 ? BufferUse{{tokens_, d_residual_}, {embedding_scratch_}}
                                   : backward(operation.unit, operation.kind == OpKind::kBackwardInput);
      case OpKind::kBackwardWeight:
        return backward_weight(operation.unit);
      default:
        return {};
    }
  }

 private:
  struct Block {
    int input = 0, rstd1 = 0, qkv = 0, attention = 0, lse = 0, middle = 0, rstd2 = 0, ffn = 0;
    int normed = 0, activation = 0;                   // of the forward pass
    int wide = 0, backward_normed = 0, d_normed = 0;  // of the backward pass
    int kept_qkv = 0, kept_ffn = 0, kept_output = 0;  // gradients that deferred weight gradients read
  };

  int add(const std::string& name, int64_t bytes, Purpose purpose) {
    specs_.push_back({name, bytes, purpose});
    return static_cast<int>(specs_.size()) - 1;
  }

  void add_block(Block& b, const std::string& name) {
    const int64_t rows = shape_.rows, residual = rows * shape_.dim * 2, ffn = rows * shape_.ffn * 2;
    const auto saved = [&](const char* what, int64_t n) {
      return add(name + what, n, Purpose::kActivations);
    };
    const auto scratch = [&](const char* what, int64_t n) { return add(name + what, n, Purpose::kScratch); };
    b.input = saved(" input", residual);
    b.rstd1 = saved(" rstd1", rows * 4);
    b.qkv = saved(" qkv", 3 * residual);
    b.attention = saved(" attention", residual);
    b.lse = saved(" lse", rows * shape_.heads * 4);
    b.middle = saved(" middle", residual);
    b.rstd2 = saved(" rstd2", rows * 4);
    b.ffn = saved(" ffn", ffn);
    b.normed = scratch(" normed", residual);
    b.activation = scratch(" activation", ffn);
    b.wide = scratch(" backward wide", ffn);
    b.backward_normed = scratch(" backward normed", residual);
    b.d_normed = scratch(" normed gradient", residual);
    b.kept_qkv = scratch(" qkv gradient", 3 * residual);
    b.kept_ffn = scratch(" ffn gradient", ffn);
    b.kept_output = scratch(" output gradient", residual);
  }

  const Block& block(int unit) const { return blocks_[static_cast<size_t>(unit) - 1]; }
  int input_of(int unit) const { return unit <= shape_.blocks ? block(unit).input : head_input_; }

  BufferUse forward(int unit) const {
    const Block& b = block(unit);
    return {{b.input},
            {b.rstd1, b.qkv, b.attention, b.lse, b.middle, b.rstd2, b.ffn, b.normed, b.activation,
             input_of(unit + 1)}};
  }

  BufferUse recompute(int unit) const {
    const Block& b = block(unit);
    return {{b.input}, {b.rstd1, b.qkv, b.attention, b.lse, b.middle, b.rstd2, b.ffn, b.backward_normed}};
  }

  BufferUse backward(int unit, bool input_only) const {
    const Block& b = block(unit);
    BufferUse use = {{b.input, b.rstd1, b.qkv, b.attention, b.lse, b.middle, b.rstd2, b.ffn, d_residual_},
                     {d_residual_, b.wide, b.backward_normed, b.d_normed}};
    if (input_only) use.writes.insert(use.writes.end(), {b.kept_qkv, b.kept_ffn, b.kept_output});
    return use;
  }

  BufferUse backward_weight(int unit) const {
    const Block& b = block(unit);
    return {{b.input, b.attention, b.middle, b.ffn, b.kept_qkv, b.kept_ffn, b.kept_output}, {}};
  }

  ModelShape shape_;
  std::vector<BufferSpec> specs_;
  std::vector<Block> blocks_;
  int tokens_ = 0, targets_ = 0, head_input_ = 0, d_residual_ = 0, logits_ = 0, losses_ = 0;
  int embedding_scratch_ = 0;
};

}  // namespace minillm::shard
