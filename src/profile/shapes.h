// Internal to the table of cases: the sizes that they are made of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"
#include "core/checked.h"
#include "model/parameters.h"
#include "profile/cases.h"

namespace minillm::profile {

struct Shapes {
  int64_t rows, dim, ffn, layers, vocabulary, padded_vocabulary;
  int64_t batch, sequence, heads;
  DType dtype;
  float norm_epsilon;
  bool causal, rope, final_norm;
  struct Chunk {
    std::string suffix;  ///< of names
    int64_t rows, count;
  };
  std::vector<Chunk> chunks;  ///< of the head, in a micro-batch
  int64_t micro_batches;
  int64_t added;              ///< micro-batches whose gradients are added to unreduced ones
  int64_t block_passes;       ///< of all blocks and micro-batches
  int64_t recomputed_blocks;  ///< of these, with memory.recompute "block"
  int64_t recomputed_norms;   ///< likewise, with another mode than "none"

  Shapes(const config::Config& c, int ranks_that_share)
      : rows(c.train.micro_batch * c.train.seq_len),
        dim(c.model.dim),
        ffn(c.model.ffn_dim),
        layers(c.model.n_layers),
        vocabulary(c.model.vocab_size),
        padded_vocabulary(model::padded_vocabulary(c.model)),
        batch(c.train.micro_batch),
        sequence(c.train.seq_len),
        heads(c.model.n_heads),
        dtype(c.precision.param),
        norm_epsilon(static_cast<float>(c.model.norm_eps)),
        causal(c.model.causal),
        rope(c.model.rope_theta > 0),
        final_norm(c.model.final_norm),
        micro_batches(c.train.grad_accumulation),
        added(ranks_that_share == 1 || !c.parallel.reduce_every_micro_batch ? micro_batches - 1 : 0),
        block_passes(layers * micro_batches),
        recomputed_blocks(0),
        recomputed_norms(0) {
    for (int64_t block = 0; block < layers; ++block) {
      const config::Recompute mode = c.memory.recompute_of(block);
      recomputed_blocks += mode == config::Recompute::kBlock ? micro_batches : 0;
      recomputed_norms += mode != config::Recompute::kNone ? micro_batches : 0;
    }
    if (c.train.head_chunk <= 0) throw InternalError("step_cases: train.head_chunk is not chosen");
    const int64_t chunk = std::min(c.train.head_chunk, rows);
    chunks.push_back({"", chunk, rows / chunk});
    if (rows % chunk > 0) chunks.push_back({", last chunk", rows % chunk, 1});
  }
  Buffer activations(int64_t columns) const { return tensor(rows * columns, dtype); }
};

/// The kernels of the model's passes but for the loss, and the matrix products.
void add_model_kernels(std::vector<Case>& cases, const Shapes& s);
void add_products(std::vector<Case>& cases, const Shapes& s);

/// D[m,n] = …, as `key` says. C is D itself when `in_place`.
Case product_case(std::string name, int64_t calls, const cuda::GemmKey& key, bool in_place = false);

}  // namespace minillm::profile
