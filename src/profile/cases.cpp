#include "profile/cases.h"

#include <algorithm>
#include <regex>

#include "core/error.h"
#include "cuda/check.h"
#include "kernels/accumulate.h"
#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/cross_entropy.h"
#include "kernels/initialize.h"
#include "kernels/reduction.h"
#include "profile/shapes.h"

namespace minillm::profile {
namespace {

void add_loss(std::vector<Case>& cases, const Shapes& s) {
  const int64_t tokens = s.micro_batches * s.rows;
  cases.push_back({.name = "count_valid_targets",
                   .calls = 1,
                   .cost = {.bytes = 4 * tokens + 4, .flops = tokens},
                   .buffers = {fp32(1), ids(tokens, s.vocabulary)},
                   .run = [=](const Operands& o) {
                     const auto [count, targets] = o.take<2>();
                     kernels::count_valid_targets(count, targets, tokens, o.stream);
                   }});
  cases.push_back({.name = "reciprocal_of_count",
                   .calls = s.micro_batches,
                   .cost = {.bytes = 8, .flops = 2},
                   .buffers = {fp32(1), positive(1)},
                   .run = [](const Operands& o) {
                     const auto [scale, count] = o.take<2>();
                     kernels::reciprocal_of_count(scale, count, o.stream);
                   }});
  const int vocabulary = narrow<int>(s.vocabulary), columns = narrow<int>(s.padded_vocabulary);
  for (const auto& [suffix, count, calls] : s.chunks) {
    const int64_t rows = count;
    cases.push_back(
        {.name = "cross_entropy" + suffix,
         .calls = calls * s.micro_batches,
         .cost = kernels::cross_entropy_cost(rows, vocabulary, s.dtype, columns),
         .buffers = {tensor(rows * columns, s.dtype), fp32(rows), ids(rows, s.vocabulary), positive(1)},
         .run = [=](const Operands& o) {
           const auto [logits, loss, targets, scale] = o.take<4>();
           kernels::cross_entropy({.logits = logits,
                                   .loss = loss,
                                   .targets = targets,
                                   .scale = scale,
                                   .rows = rows,
                                   .vocabulary = vocabulary,
                                   .columns = columns,
                                   .dtype = s.dtype},
                                  o.stream);
         }});
  }
}

Case sum_case(std::string name, int64_t calls, int64_t count, bool square) {
  return {.name = std::move(name),
          .calls = calls,
          .cost = kernels::sum_cost(count),
          .buffers = {fp32(1), fp32(count), {kernels::sum_scratch(count)}},
          .run = [=](const Operands& o) {
            const auto [out, in, scratch] = o.take<3>();
            kernels::sum({.out = out, .in = in, .scratch = scratch, .count = count, .square = square},
                         o.stream);
          }};
}

Case adamw_case(std::string name, int64_t calls, int64_t count, const config::Config& config) {
  const DType moments = config.precision.moments;
  const DType parameters = config.precision.param;
  const bool halves = parameters != DType::kFp32;
  const auto seed = static_cast<uint64_t>(config.train.seed);
  const config::Optimizer& optimizer = config.train.optimizer;
  const kernels::AdamWOptions options = {.beta1 = optimizer.beta1,
                                         .beta2 = optimizer.beta2,
                                         .epsilon = optimizer.eps,
                                         .weight_decay = optimizer.weight_decay};
  const kernels::AdamWStep first_step = kernels::adamw_step(options, optimizer.lr, 1);
  return {.name = std::move(name),
          .calls = calls,
          .cost = kernels::adamw_cost(count, moments),
          .buffers = {tensor(count, parameters),
                      halves ? tensor(count, DType::kBf16) : Buffer{},
                      tensor(count, moments),
                      positive(count, moments),
                      fp32(count),
                      positive(1),
                      {sizeof(first_step)}},
          .run =
              [=](const Operands& o) {
                const auto [parameter, lower_half, moment1, moment2, gradient, scale, step] = o.take<7>();
                kernels::adamw({.parameter = parameter,
                                .lower_half = halves ? static_cast<uint16_t*>(lower_half) : nullptr,
                                .moment1 = moment1,
                                .moment2 = moment2,
                                .gradient = gradient,
                                .gradient_scale = scale,
                                .step = step,
                                .count = count,
                                .options = options,
                                .moment_type = moments,
                                .seed = seed},
                               o.stream);
              },
          .prepare =
              [=](const Operands& o) {
                cuda::check(cudaMemcpyAsync(o.buffers.back().at, &first_step, sizeof(first_step),
                                            cudaMemcpyHostToDevice, o.stream));
                cuda::check(cudaStreamSynchronize(o.stream));
              }};
}

/// A segment: its elements on a rank and in all, and how many units have one like it.
struct Shard {
  std::string name;
  int64_t elements, full_elements, count;
};
std::vector<Shard> shards_of(const shard::Layout& layout, const Shapes& s) {
  std::vector<Shard> list;
  const auto add = [&](const std::string& name, const shard::UnitLayout& unit, int64_t count) {
    for (size_t i = 0; i < unit.segments.size(); ++i)
      list.push_back({unit.segments.size() > 1 ? name + " segment " + std::to_string(i) : name,
                      unit.segments[i].shard_elements, unit.segments[i].padded_elements, count});
  };
  add("embedding", layout.units.front(), 1);
  add("block", layout.units[1], s.layers);
  add("head", layout.units.back(), 1);
  return list;
}

void add_optimizer(std::vector<Case>& cases, const config::Config& config, const shard::Layout& layout,
                   const Shapes& s) {
  const std::vector<Shard> shards = shards_of(layout, s);
  cases.push_back(sum_case("sum of losses", s.micro_batches, s.rows, false));
  cases.push_back(sum_case("sum of micro-batches", 1, s.micro_batches, false));
  int64_t segments = 0;
  for (const auto& [name, shard, full, count] : shards) {
    cases.push_back(sum_case("sum of squares, " + name, count, shard, true));
    segments += count;
  }
  cases.push_back(sum_case("sum of segments", 1, segments, false));
  const auto limit = static_cast<float>(config.train.grad_clip);
  cases.push_back({.name = "clip_factor",
                   .calls = limit > 0 ? 1 : 2,  // without clipping also of the loss
                   .cost = {.bytes = 12, .flops = 4},
                   .buffers = {fp32(1), fp32(1), positive(1)},
                   .run = [=](const Operands& o) {
                     const auto [factor, norm, sum_of_squares] = o.take<3>();
                     kernels::clip_factor(
                         {.factor = factor, .norm = norm, .sum_of_squares = sum_of_squares, .limit = limit},
                         o.stream);
                   }});
  for (const auto& [name, shard, full, count] : shards)
    cases.push_back(adamw_case("adamw, " + name, count, shard, config));
}

/// Between unreduced gradients and shards: rounding for the wire, and adding what was reduced apart.
void add_reduction(std::vector<Case>& cases, const config::Config& config, const shard::Layout& layout,
                   const Shapes& s) {
  const DType type = config.precision.reduce;
  const bool shared = layout.world > 1, rounds = shared && type != DType::kFp32;
  const int64_t reductions = config.parallel.reduce_every_micro_batch ? s.micro_batches : 1;
  const bool apart = rounds || (shared && reductions > 1);
  for (const auto& [name, shard, full, count] : shards_of(layout, s)) {
    const kernels::Cast cast = {.count = full};
    cases.push_back({.name = "cast of gradients, " + name,
                     .calls = rounds ? count * reductions : 0,
                     .cost = kernels::cast_cost(cast),
                     .buffers = {tensor(full, cast.out_type), tensor(full, cast.in_type)},
                     .run = [=](const Operands& o) {
                       const auto [out, in] = o.take<2>();
                       kernels::cast({.out = out, .in = in, .count = cast.count}, o.stream);
                     }});
    const kernels::Accumulate piece = {.count = shard, .in_type = type, .accumulate = reductions > 1};
    cases.push_back({.name = "accumulate, " + name,
                     .calls = apart ? count * reductions : 0,
                     .cost = kernels::accumulate_cost(piece),
                     .buffers = {fp32(shard), tensor(shard, type)},
                     .run = [=](const Operands& o) {
                       const auto [out, in] = o.take<2>();
                       kernels::accumulate({.out = out,
                                            .in = in,
                                            .count = piece.count,
                                            .in_type = piece.in_type,
                                            .accumulate = piece.accumulate},
                                           o.stream);
                     }});
  }
}

/// What a run does once, before its first step.
void add_initial_values(std::vector<Case>& cases, const shard::Layout& layout) {
  const int64_t count = layout.units[1].shard_elements;
  cases.push_back({.name = "initialize, block",
                   .calls = 0,
                   .cost = {.bytes = 4 * count},
                   .buffers = {fp32(count)},
                   .run = [=](const Operands& o) {
                     const auto [out] = o.take<1>();
                     kernels::initialize(
                         {.out = out, .count = count, .distribution = kernels::Distribution::kNormal, .a = 1},
                         o.stream);
                   }});
  const kernels::Cast cast = {.count = count};
  cases.push_back({.name = "cast, block",
                   .calls = 0,
                   .cost = kernels::cast_cost(cast),
                   .buffers = {tensor(count, cast.out_type), tensor(count, cast.in_type)},
                   .run = [=](const Operands& o) {
                     const auto [out, in] = o.take<2>();
                     kernels::cast({.out = out, .in = in, .count = count}, o.stream);
                   }});
}

}  // namespace

std::vector<Case> step_cases(const config::Config& config, const shard::Layout& layout) {
  const Shapes shapes(config, layout.world);
  std::vector<Case> cases;
  add_model_kernels(cases, shapes);
  add_loss(cases, shapes);
  add_optimizer(cases, config, layout, shapes);
  add_products(cases, shapes);
  add_reduction(cases, config, layout, shapes);
  add_initial_values(cases, layout);
  std::stable_partition(cases.begin(), cases.end(), [](const Case& c) { return c.calls > 0; });
  return cases;
}

std::vector<Case> matching(std::vector<Case> cases, const std::string& pattern) {
  constexpr size_t kLongest = 200;  // the library that translates it calls itself for each parenthesis
  if (pattern.size() > kLongest)
    throw UsageError("--only has " + std::to_string(pattern.size()) + " characters; at most 200 are allowed");
  std::string names;
  for (const Case& c : cases) names += "\n  " + c.name;
  try {
    const std::regex expression(pattern);
    std::erase_if(cases, [&](const Case& c) { return !std::regex_search(c.name, expression); });
  } catch (const std::regex_error& error) {
    throw UsageError("--only " + pattern + ": not a regular expression: " + error.what());
  }
  if (cases.empty()) throw UsageError("--only " + pattern + ": matches none of" + names);
  return cases;
}

}  // namespace minillm::profile
