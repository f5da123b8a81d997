#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>

#include "config/strict_json.h"
#include "core/error.h"
#include "cuda/gemm_cache.h"

namespace minillm::cuda {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;
constexpr size_t kDigitsPerWord = 16;

std::string hex_of(const GemmAlgorithm& algorithm) {
  std::string text;
  for (const uint64_t word : algorithm)
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  return text;
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(what);
}

GemmAlgorithm algorithm_of(const std::string& hex) {
  GemmAlgorithm algorithm{};
  if (hex.size() != kDigitsPerWord * algorithm.size()) refuse("an algorithm is not 128 hexadecimal digits");
  for (size_t i = 0; i < hex.size(); ++i) {
    const size_t digit = std::string_view("0123456789abcdef").find(hex[i]);
    if (digit == std::string_view::npos) refuse("an algorithm is not 128 hexadecimal digits");
    uint64_t& word = algorithm[i / kDigitsPerWord];
    word = word << 4 | digit;
  }
  return algorithm;
}

int64_t integer(const Json& object, const char* key, int64_t least, int64_t most) {
  const Json& value = object.at(key);
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && !std::in_range<int64_t>(value.get<uint64_t>())))
    refuse(std::string(key) + " is not an integer");
  const int64_t number = value.get<int64_t>();
  if (number < least || number > most) refuse(std::string(key) + " is " + std::to_string(number));
  return number;
}

int small_integer(const Json& object, const char* key, int least) {
  return static_cast<int>(integer(object, key, least, std::numeric_limits<int>::max()));
}

bool boolean(const Json& object, const char* key) {
  return object.at(key).get<bool>();
}

DType type(const Json& object, const char* key) {
  const auto name = object.at(key).get<std::string>();
  for (const DType type : {DType::kBf16, DType::kFp32})
    if (name == name_of(type)) return type;
  refuse(std::string(key) + " is \"" + name + "\"");
}

double seconds(const Json& object, const char* key) {
  const double value = object.at(key).get<double>();
  if (!std::isfinite(value) || value <= 0) refuse(std::string(key) + " is no time");
  return value;
}

std::array<uint32_t, 5> alignments(const Json& object, bool bias) {
  const Json& list = object.at("alignments");
  std::array<uint32_t, 5> values;
  if (!list.is_array() || list.size() != values.size()) refuse("alignments are not five numbers");
  for (size_t i = 0; i < values.size(); ++i) {
    if (!list[i].is_number_unsigned()) refuse("an alignment is no number");
    values[i] = list[i].get<uint32_t>();
    const bool absent = i == 4 && !bias;
    if (absent ? values[i] != 0 : values[i] > 256 || !std::has_single_bit(values[i]))
      refuse("an alignment is " + std::to_string(values[i]));
  }
  return values;
}

Json to_json(const GemmKey& key, const GemmChoice& choice) {
  return {{"m", key.m},
          {"n", key.n},
          {"k", key.k},
          {"transpose_a", key.transpose_a},
          {"transpose_b", key.transpose_b},
          {"accumulate", key.accumulate},
          {"bias", key.bias},
          {"input", name_of(key.input)},
          {"output", name_of(key.output)},
          {"alignments", {key.align_a, key.align_b, key.align_c, key.align_d, key.align_bias}},
          {"sm_limit", key.sm_limit},
          {"candidate", choice.candidate},
          {"candidates", choice.candidates},
          {"seconds", choice.seconds},
          {"first_seconds", choice.first_seconds},
          {"algorithm", hex_of(choice.algorithm)}};
}

GemmKey key_of(const Json& object) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  GemmKey key{.m = integer(object, "m", 1, kMost),
              .n = integer(object, "n", 1, kMost),
              .k = integer(object, "k", 1, kMost),
              .transpose_a = boolean(object, "transpose_a"),
              .transpose_b = boolean(object, "transpose_b"),
              .accumulate = boolean(object, "accumulate"),
              .bias = boolean(object, "bias"),
              .input = type(object, "input"),
              .output = type(object, "output"),
              .sm_limit = small_integer(object, "sm_limit", 0)};
  const auto [a, b, c, d, bias] = alignments(object, key.bias);
  key.align_a = a, key.align_b = b, key.align_c = c, key.align_d = d, key.align_bias = bias;
  return key;
}

GemmChoice choice_of(const Json& object) {
  GemmChoice choice{.algorithm = algorithm_of(object.at("algorithm").get<std::string>()),
                    .candidate = small_integer(object, "candidate", 0),
                    .candidates = small_integer(object, "candidates", 1),
                    .seconds = seconds(object, "seconds"),
                    .first_seconds = seconds(object, "first_seconds")};
  if (choice.candidate >= choice.candidates) refuse("candidate is " + std::to_string(choice.candidate));
  return choice;
}

}  // namespace

std::string to_json(const GemmCache& cache) {
  Json devices = Json::array();
  for (const auto& [device, choices] : cache) {
    Json list = Json::array();
    for (const auto& [key, choice] : choices) list.push_back(to_json(key, choice));
    devices.push_back({{"gpu", device.name},
                       {"multiprocessors", device.multiprocessors},
                       {"driver", device.driver},
                       {"cublaslt", device.blas},
                       {"choices", list}});
  }
  return Json{{"format", kFormat}, {"devices", devices}}.dump(1) + "\n";
}

GemmCache parse_gemm_cache(const std::string& text, const std::string& name) try {
  const Json document = config::parse_strict_json(text, name);
  if (integer(document, "format", 0, std::numeric_limits<int>::max()) != kFormat)
    refuse("its format is not " + std::to_string(kFormat));
  GemmCache cache;
  for (const Json& entry : document.at("devices")) {
    const GemmDevice device{.name = entry.at("gpu").get<std::string>(),
                            .multiprocessors = small_integer(entry, "multiprocessors", 1),
                            .driver = small_integer(entry, "driver", 0),
                            .blas = integer(entry, "cublaslt", 0, std::numeric_limits<int64_t>::max())};
    GemmChoices& choices = cache[device];
    for (const Json& choice : entry.at("choices")) choices[key_of(choice)] = choice_of(choice);
  }
  return cache;
} catch (const nlohmann::json::exception& error) {
  throw InputError(name + ": not a file of gemm choices (" + error.what() + ")");
} catch (const std::invalid_argument& error) {
  throw InputError(name + ": not a file of gemm choices (" + error.what() + ")");
}

}  // namespace minillm::cuda
