#include "config/schema.h"

#include <charconv>

#include "core/error.h"

namespace minillm::config {
namespace {

std::string shortest(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

/// `value` for a member named `path`, as in "model.dim (100)".
std::string named(const char* path, int64_t value) {
  return std::string(path) + " (" + std::to_string(value) + ")";
}

void require(bool holds, const std::string& name, const std::string& otherwise) {
  if (!holds) throw UsageError(name + ": " + otherwise);
}

}  // namespace

std::string Integer::wanted() const {
  return "an integer from " + std::to_string(least) + " to " + std::to_string(most);
}

std::string Real::wanted() const {
  return "a number of at least " + shortest(least) + (most_excluded ? " and below " : " and at most ") +
         shortest(most);
}

void check_model(const Model& model, const std::string& name) {
  const std::string dim = named("model.dim", model.dim), heads = named("model.n_heads", model.n_heads);
  require(model.dim % model.n_heads == 0, name, dim + " is not a multiple of " + heads);
  constexpr int64_t kHeadSizeStep = 8, kLargestHeadSize = 128;  // of the attention kernels
  require(model.head_size() % kHeadSizeStep == 0 && model.head_size() <= kLargestHeadSize, name,
          "the head size " + dim + " / " + heads + " = " + std::to_string(model.head_size()) +
              " is not allowed; it must be a multiple of 8, at most 128");

  // In floating point, because the exact number may not exist.
  const double dims = model.dim, parameters = 2.0 * model.vocab_size * dims +
                                              model.n_layers * dims * (4.0 * dims + 2.0 * model.ffn_dim);
  constexpr double kMostParameters = int64_t{1}
                                     << 56;  // fp32 master, moments and gradient of them fit 2^63 bytes
  require(parameters <= kMostParameters, name,
          "a model of about " + shortest(parameters) +
              " parameters; at most 2^56 can be counted in bytes. Reduce " +
              named("model.vocab_size", model.vocab_size) + ", " + dim + ", " +
              named("model.n_layers", model.n_layers) + " or " + named("model.ffn_dim", model.ffn_dim));
}

void check_config(const Config& config, const std::string& name) {
  check_model(config.model, name);
  const Train& train = config.train;
  require(train.micro_batch * train.seq_len <= std::numeric_limits<int32_t>::max(), name,
          named("train.micro_batch", train.micro_batch) + " * " + named("train.seq_len", train.seq_len) +
              " = " + std::to_string(train.micro_batch * train.seq_len) +
              " tokens; at most 2147483647 per rank and step");
  require(config.data.source != "text" || !config.data.path.empty(), name,
          "data.source is \"text\" but data.path is empty; name a file or a glob, e.g. \"corpus/*.txt\"");
  require(config.gemm.cache.empty() || !config.gemm.deterministic, name,
          "gemm.cache (\"" + config.gemm.cache +
              "\") holds timed choices, which gemm.deterministic (true) does not use; set "
              "gemm.deterministic=false, or leave gemm.cache empty");
}

}  // namespace minillm::config
