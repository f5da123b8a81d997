// The kernels that model/ runs; of a block unless said otherwise.
#include <cmath>

#include "kernels/attention.h"
#include "kernels/bias_gradient.h"
#include "kernels/embedding.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"
#include "kernels/silu.h"
#include "kernels/swiglu.h"
#include "profile/shapes.h"

namespace minillm::profile {
namespace {

void add_embeddings(std::vector<Case>& cases, const Shapes& s) {
  const int columns = narrow<int>(s.dim);
  cases.push_back(
      {.name = "embedding_forward",
       .calls = s.micro_batches,
       .cost = kernels::embedding_forward_cost(s.rows, columns, s.dtype),
       .buffers = {s.activations(s.dim), tensor(s.vocabulary * s.dim, s.dtype), ids(s.rows, s.vocabulary)},
       .run = [=](const Operands& o) {
         const auto [out, table, tokens] = o.take<3>();
         kernels::embedding_forward({.out = out,
                                     .table = table,
                                     .tokens = tokens,
                                     .count = s.rows,
                                     .columns = columns,
                                     .dtype = s.dtype},
                                    o.stream);
       }});
  cases.push_back({.name = "embedding_backward",
                   .calls = s.micro_batches,
                   .cost = kernels::embedding_backward_cost(s.rows, s.vocabulary, columns, s.dtype),
                   .buffers = {fp32(s.vocabulary * s.dim),
                               s.activations(s.dim),
                               ids(s.rows, s.vocabulary),
                               {kernels::embedding_backward_scratch(s.rows, s.vocabulary, columns)}},
                   .run = [=](const Operands& o) {
                     const auto [dtable, dout, tokens, scratch] = o.take<4>();
                     kernels::embedding_backward({.dtable = dtable,
                                                  .dout = dout,
                                                  .tokens = tokens,
                                                  .scratch = scratch,
                                                  .count = s.rows,
                                                  .vocabulary = s.vocabulary,
                                                  .columns = columns,
                                                  .dtype = s.dtype},
                                                 o.stream);
                   }});
}

void add_norms(std::vector<Case>& cases, const Shapes& s) {
  const int columns = narrow<int>(s.dim);
  const Buffer x = s.activations(s.dim), weight = tensor(s.dim, s.dtype), rstd = positive(s.rows);
  cases.push_back({.name = "rmsnorm_forward",
                   .calls = 2 * (s.block_passes + s.recomputed_blocks) + (s.final_norm ? s.micro_batches : 0),
                   .cost = kernels::rmsnorm_forward_cost(s.rows, columns, s.dtype),
                   .buffers = {x, rstd, x, weight},
                   .run = [=](const Operands& o) {
                     const auto [y, rstd, x, weight] = o.take<4>();
                     kernels::rmsnorm_forward({.y = y,
                                               .rstd = rstd,
                                               .x = x,
                                               .weight = weight,
                                               .rows = s.rows,
                                               .columns = columns,
                                               .epsilon = s.norm_epsilon,
                                               .dtype = s.dtype},
                                              o.stream);
                   }});
  cases.push_back({.name = "rmsnorm_recompute",
                   .calls = 2 * s.recomputed_norms,
                   .cost = kernels::rmsnorm_recompute_cost(s.rows, columns, s.dtype),
                   .buffers = {x, rstd, x, weight},
                   .run = [=](const Operands& o) {
                     const auto [y, rstd, x, weight] = o.take<4>();
                     kernels::rmsnorm_recompute({.y = y,
                                                 .rstd = rstd,
                                                 .x = x,
                                                 .weight = weight,
                                                 .rows = s.rows,
                                                 .columns = columns,
                                                 .dtype = s.dtype},
                                                o.stream);
                   }});
  // No product needs its residual added here: those of the model add it themselves.
  cases.push_back({.name = "rmsnorm_residual_forward",
                   .calls = 0,
                   .cost = kernels::rmsnorm_residual_forward_cost(s.rows, columns, s.dtype),
                   .buffers = {x, x, rstd, x, x, weight},
                   .run = [=](const Operands& o) {
                     const auto [sum, y, rstd, x, residual, weight] = o.take<6>();
                     kernels::rmsnorm_residual_forward({.sum = sum,
                                                        .y = y,
                                                        .rstd = rstd,
                                                        .x = x,
                                                        .residual = residual,
                                                        .weight = weight,
                                                        .rows = s.rows,
                                                        .columns = columns,
                                                        .epsilon = s.norm_epsilon,
                                                        .dtype = s.dtype},
                                                       o.stream);
                   }});
}

/// In place as in the model: over the residual's gradient, or over that of the final norm's output.
void add_norm_gradients(std::vector<Case>& cases, const Shapes& s) {
  const int columns = narrow<int>(s.dim);
  const Buffer x = s.activations(s.dim);
  for (const bool residual : {true, false}) {
    cases.push_back({.name = residual ? "rmsnorm_backward" : "rmsnorm_backward, final norm",
                     .calls = residual ? 2 * s.block_passes : (s.final_norm ? s.micro_batches : 0),
                     .cost = kernels::rmsnorm_backward_cost(s.rows, columns, residual, s.dtype),
                     .buffers = {x,
                                 fp32(s.dim),
                                 residual ? x : Buffer{},
                                 x,
                                 tensor(s.dim, s.dtype),
                                 positive(s.rows),
                                 {kernels::rmsnorm_backward_scratch(s.rows, columns)}},
                     .run = [=](const Operands& o) {
                       const auto [dx, dweight, dy, x, weight, rstd, scratch] = o.take<7>();
                       kernels::rmsnorm_backward({.dx = dx,
                                                  .dweight = dweight,
                                                  .dy = residual ? dy : dx,
                                                  .x = x,
                                                  .weight = weight,
                                                  .rstd = rstd,
                                                  .residual = residual ? static_cast<void*>(dx) : nullptr,
                                                  .scratch = scratch,
                                                  .rows = s.rows,
                                                  .columns = columns,
                                                  .dtype = s.dtype},
                                                 o.stream);
                     }});
  }
}

void add_rope(std::vector<Case>& cases, const Shapes& s) {
  const int sequence = narrow<int>(s.sequence), heads = narrow<int>(s.heads),
            head_size = narrow<int>(s.dim / s.heads);
  cases.push_back({.name = "rope",
                   // Forward, and back in the backward pass.
                   .calls = s.rope ? 2 * s.block_passes + s.recomputed_blocks : 0,
                   .cost = kernels::rope_cost(s.batch, sequence, heads, head_size, s.dtype),
                   .buffers = {s.activations(3 * s.dim), fp32(s.sequence * head_size)},
                   .run = [=](const Operands& o) {
                     const auto [qkv, table] = o.take<2>();
                     kernels::rope({.qkv = qkv,
                                    .table = table,
                                    .batch = s.batch,
                                    .sequence = sequence,
                                    .heads = heads,
                                    .head_size = head_size,
                                    .dtype = s.dtype},
                                   o.stream);
                   }});
}

void add_attention(std::vector<Case>& cases, const Shapes& s) {
  const int head_size = narrow<int>(s.dim / s.heads);
  const kernels::AttentionShape shape = {.batch = s.batch,
                                         .sequence = narrow<int>(s.sequence),
                                         .heads = narrow<int>(s.heads),
                                         .head_size = head_size,
                                         .causal = s.causal,
                                         .scale = 1.0f / std::sqrt(static_cast<float>(head_size)),
                                         .dtype = s.dtype};
  const Buffer qkv = s.activations(3 * s.dim), out = s.activations(s.dim), lse = fp32(s.rows * s.heads);
  cases.push_back({.name = "attention_forward",
                   .calls = s.block_passes + s.recomputed_blocks,
                   .cost = kernels::attention_forward_cost(shape),
                   .buffers = {out, lse, qkv},
                   .run = [=](const Operands& o) {
                     const auto [out, lse, qkv] = o.take<3>();
                     kernels::attention_forward({.shape = shape, .out = out, .lse = lse, .qkv = qkv},
                                                o.stream);
                   }});
  cases.push_back({.name = "attention_backward",
                   .calls = s.block_passes,
                   .cost = kernels::attention_backward_cost(shape),
                   .buffers = {qkv, out, qkv, out, lse, {kernels::attention_backward_scratch(shape)}},
                   .run =
                       [=](const Operands& o) {
                         const auto [dqkv, dout, qkv, out, lse, scratch] = o.take<6>();
                         kernels::attention_backward({.shape = shape,
                                                      .dqkv = dqkv,
                                                      .dout = dout,
                                                      .qkv = qkv,
                                                      .out = out,
                                                      .lse = lse,
                                                      .scratch = scratch},
                                                     o.stream);
                       },
                   .prepare =
                       [=](const Operands& o) {
                         const auto [dqkv, dout, qkv, out, lse, scratch] = o.take<6>();
                         kernels::attention_forward({.shape = shape, .out = out, .lse = lse, .qkv = qkv},
                                                    o.stream);
                       }});
}

void add_activations(std::vector<Case>& cases, const Shapes& s) {
  const Buffer narrow_rows = s.activations(s.ffn), wide_rows = s.activations(2 * s.ffn);
  const int64_t count = s.rows * s.ffn;
  const int columns = narrow<int>(s.ffn);
  cases.push_back({.name = "silu_forward",
                   .calls = s.block_passes + s.recomputed_norms,  // once more in the backward pass
                   .cost = kernels::silu_forward_cost(count, s.dtype),
                   .buffers = {narrow_rows, narrow_rows},
                   .run = [=](const Operands& o) {
                     const auto [y, u] = o.take<2>();
                     kernels::silu_forward({.y = y, .u = u, .count = count, .dtype = s.dtype}, o.stream);
                   }});
  cases.push_back({.name = "silu_backward",
                   .calls = s.block_passes,
                   .cost = kernels::silu_backward_cost(count, s.dtype),
                   .buffers = {narrow_rows, narrow_rows},
                   .run = [=](const Operands& o) {
                     const auto [d, u] = o.take<2>();
                     kernels::silu_backward({.du = d, .dy = d, .u = u, .count = count, .dtype = s.dtype},
                                            o.stream);
                   }});
  cases.push_back({.name = "swiglu_forward",
                   .calls = 0,
                   .cost = kernels::swiglu_forward_cost(s.rows, columns, s.dtype),
                   .buffers = {narrow_rows, wide_rows},
                   .run = [=](const Operands& o) {
                     const auto [h, gate_up] = o.take<2>();
                     kernels::swiglu_forward(
                         {.h = h, .gate_up = gate_up, .rows = s.rows, .columns = columns, .dtype = s.dtype},
                         o.stream);
                   }});
  cases.push_back({.name = "swiglu_backward",
                   .calls = 0,
                   .cost = kernels::swiglu_backward_cost(s.rows, columns, s.dtype, /*with_h=*/true),
                   .buffers = {wide_rows, narrow_rows, wide_rows, narrow_rows},
                   .run = [=](const Operands& o) {
                     const auto [dgate_up, dh, gate_up, h] = o.take<4>();
                     kernels::swiglu_backward({.dgate_up = dgate_up,
                                               .dh = dh,
                                               .gate_up = gate_up,
                                               .h = h,
                                               .rows = s.rows,
                                               .columns = columns,
                                               .dtype = s.dtype},
                                              o.stream);
                   }});
}

void add_bias_gradients(std::vector<Case>& cases, const Shapes& s) {
  for (const auto& [name, wide] :
       {std::pair{"bias_gradient qkv", 3 * s.dim}, std::pair{"bias_gradient out", s.dim}}) {
    const int columns = narrow<int>(wide);
    cases.push_back({.name = name,
                     .calls = s.block_passes,
                     .cost = kernels::bias_gradient_cost(s.rows, columns, s.dtype),
                     .buffers = {fp32(columns),
                                 s.activations(columns),
                                 {kernels::bias_gradient_scratch(s.rows, columns)}},
                     .run = [=](const Operands& o) {
                       const auto [dbias, dy, scratch] = o.take<3>();
                       kernels::bias_gradient({.dbias = dbias,
                                               .dy = dy,
                                               .scratch = scratch,
                                               .rows = s.rows,
                                               .columns = columns,
                                               .dtype = s.dtype},
                                              o.stream);
                     }});
  }
}

}  // namespace

void add_model_kernels(std::vector<Case>& cases, const Shapes& s) {
  add_embeddings(cases, s);
  add_norms(cases, s);
  add_norm_gradients(cases, s);
  add_rope(cases, s);
  add_attention(cases, s);
  add_activations(cases, s);
  add_bias_gradients(cases, s);
}

}  // namespace minillm::profile
