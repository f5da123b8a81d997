// A small model's operations, run one at a time on memory that the tests can look at and overwrite: what the
// executor does, without schedule, plan or ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"
#include "cuda/gemm.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "model/transformer.h"
#include "shard/layout.h"
#include "shard/schedule.h"
#include "tests/sanitizers.h"

namespace minillm::model::test {

using minillm::test::kSanitized;

/// Two blocks, sizes of which none divides another.
config::Model small_model(bool rope_and_final_norm);
inline constexpr int64_t kBatch = 3, kSequence = 7, kRows = kBatch * kSequence;
inline constexpr int64_t kHeadChunk = 8;  // so the last chunk is short

struct Variant {
  DType dtype = DType::kBf16;
  bool rope_and_final_norm = true;
  Recomputation recomputation = {};
  int64_t micro_batches = 1;
  int64_t first_micro_batch = 0;     ///< of the data, which is a function of its number
  int64_t ignored_micro_batch = -1;  ///< its targets do not count
  int64_t vocabulary = 53;
  int64_t head_chunk = kHeadChunk;  ///< kRows: one chunk, so that the head may be split
};

using Bytes = std::vector<std::byte>;

/// All that operations may change.
struct State {
  std::vector<Bytes> buffers;    ///< by index into Transformer::buffers()
  std::vector<Bytes> gradients;  ///< by unit
  Bytes loss_sums;
};

class ModelRig {
 public:
  /// Weights are random; buffers, gradients and loss sums start as 0xFF bytes, which are NaN, the gradients'
  /// padding as zeros. The inputs are there. `valid_count`: of the targets, on all ranks.
  ModelRig(const Variant& variant, float valid_count);

  const Transformer& transformer() const { return transformer_; }
  const shard::Layout& layout() const { return layout_; }
  const Variant& variant() const { return variant_; }
  int blocks() const { return transformer_.head_unit() - 1; }
  int buffer(const std::string& name) const;

  /// Runs the operation to its end. The shapes of its products, each once.
  std::vector<cuda::GemmKey> run(const shard::Operation& operation);
  /// The buffer of logits after Transformer::logits_of().
  Bytes logits_of(int64_t row);

  State save() const;
  void restore(const State& state);
  void poison(int buffer);

  /// A unit's flat weights, and others for them, which are rounded to the rig's type.
  const std::vector<float>& weights(int unit) const { return weight_values_[static_cast<size_t>(unit)]; }
  void set_weights(int unit, const std::vector<float>& values);

  std::vector<float> gradients(int unit) const;
  std::vector<float> loss_sums() const;
  /// A tensor's gradient, by the end of its name.
  std::vector<float> gradient(int unit, const std::string& suffix) const;

 private:
  shard::Operands operands(const shard::Operation& operation) const;

  Variant variant_;
  config::Model model_;
  shard::Layout layout_;
  Transformer transformer_;
  cuda::Stream stream_;
  cuda::DeviceMemory workspace_, valid_count_, loss_sums_;
  std::vector<cuda::DeviceMemory> weights_, gradients_, buffers_;
  std::vector<std::vector<float>> weight_values_;
  std::vector<std::byte*> addresses_;
};

/// A micro-batch's operations in the order of a step. Split: with kBackwardInput for all blocks, and for the
/// head where its rows are one chunk; then kBackwardWeight by segment.
std::vector<shard::Operation> micro_batch(const ModelRig& rig, bool split, int micro_batch = 0,
                                          bool accumulate = false);
/// The rig after all of them.
void run_all(ModelRig& rig, const std::vector<shard::Operation>& operations);

}  // namespace minillm::model::test
