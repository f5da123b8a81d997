#include "profile/cases.h"

#include <algorithm>
#include <regex>

#include "core/error.h"
#include "kernels/adamw.h"
#include "kernels/cast.h"
#include "kernels/cross_entropy.h"
#include "kernels/initialize.h"
#include "kernels/reduction.h"
#include "profile/shapes.h"

namespace minillm::profile {
namespace {

void add_loss(std::vector<Case>& cases, const Shapes& s) {
  cases.push_back({.name = "count_valid_targets",
                   .calls = 1,
                   .cost = {.bytes = 4 * s.rows + 4, .flops = s.rows},
                   .buffers = {fp32(1), ids(s.rows, s.vocabulary)},
                   .run = [=](const Operands& o) {
                     const auto [count, targets] = o.take<2>();
                     kernels::count_valid_targets(count, targets, s.rows, o.stream);
                   }});
  cases.push_back({.name = "reciprocal_of_count",
                   .calls = 1,
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
         .calls = calls,
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
  const bool copy = config.precision.param != DType::kFp32;
  const auto seed = static_cast<uint64_t>(config.train.seed);
  const config::Optimizer optimizer = config.train.optimizer;
  return {.name = std::move(name),
          .calls = calls,
          .cost = kernels::adamw_cost(count, copy, moments),
          .buffers = {fp32(count), tensor(count, moments), positive(count, moments),
                      copy ? tensor(count, DType::kBf16) : Buffer{}, fp32(count), positive(1)},
          .run = [=](const Operands& o) {
            const auto [master, moment1, moment2, parameter, gradient, scale] = o.take<6>();
            kernels::adamw({.master = master,
                            .moment1 = moment1,
                            .moment2 = moment2,
                            .parameter = copy ? static_cast<void*>(parameter) : nullptr,
                            .gradient = gradient,
                            .gradient_scale = scale,
                            .count = count,
                            .learning_rate = optimizer.lr,
                            .beta1 = optimizer.beta1,
                            .beta2 = optimizer.beta2,
                            .epsilon = optimizer.eps,
                            .weight_decay = optimizer.weight_decay,
                            .step = 1,
                            .moment_type = moments,
                            .seed = seed},
                           o.stream);
          }};
}

void add_optimizer(std::vector<Case>& cases, const config::Config& config, const shard::Layout& layout,
                   const Shapes& s) {
  struct Shard {
    std::string name;
    int64_t elements, count;
  };
  const std::vector<Shard> shards = {{"embedding", layout.units.front().shard_elements, 1},
                                     {"block", layout.units[1].shard_elements, s.layers},
                                     {"head", layout.units.back().shard_elements, 1}};
  cases.push_back(sum_case("sum of losses", 1, s.rows, false));
  for (const auto& [name, elements, count] : shards)
    cases.push_back(sum_case("sum of squares, " + name, count, elements, true));
  cases.push_back(sum_case("sum of units", 1, std::ssize(layout.units), false));
  const auto limit = static_cast<float>(config.train.grad_clip);
  cases.push_back({.name = "clip_factor",
                   .calls = 1,
                   .cost = {.bytes = 12, .flops = 4},
                   .buffers = {fp32(1), fp32(1), positive(1)},
                   .run = [=](const Operands& o) {
                     const auto [factor, norm, sum_of_squares] = o.take<3>();
                     kernels::clip_factor(
                         {.factor = factor, .norm = norm, .sum_of_squares = sum_of_squares, .limit = limit},
                         o.stream);
                   }});
  for (const auto& [name, elements, count] : shards)
    cases.push_back(adamw_case("adamw, " + name, count, elements, config));
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
  const Shapes shapes(config);
  std::vector<Case> cases;
  add_model_kernels(cases, shapes);
  add_loss(cases, shapes);
  add_optimizer(cases, config, layout, shapes);
  add_products(cases, shapes);
  add_initial_values(cases, layout);
  std::stable_partition(cases.begin(), cases.end(), [](const Case& c) { return c.calls > 0; });
  return cases;
}

std::vector<Case> matching(std::vector<Case> cases, const std::string& pattern) {
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
