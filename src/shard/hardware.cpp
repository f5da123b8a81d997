#include "shard/hardware.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "config/strict_json.h"
#include "core/edit_distance.h"
#include "core/error.h"
#include "core/text_file.h"
#include "shard/hardware_files.h"

namespace minillm::shard {
namespace {

using Json = nlohmann::ordered_json;

template <class Names>
std::string nearest(std::string_view name, const Names& names) {
  return std::string(
      std::ranges::min(names, {}, [&](std::string_view other) { return edit_distance(name, other); }));
}

/// The members of an object, each asked for once; whatever nobody asked for is unknown.
class Members {
 public:
  Members(const Json& object, std::string path, const std::string& file)
      : object_(object), path_(std::move(path)), file_(file) {
    if (!object.is_object()) fail(path_.empty() ? "the file" : quoted(path_), object, "an object { … }");
  }

  /// Null where it is absent.
  const Json* find(const char* key) {
    known_.emplace_back(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  const Json& get(const char* key) {
    if (const Json* value = find(key)) return *value;
    throw InputError(file_ + ": the key " + quoted(path_of(key)) + " is missing");
  }

  std::string text(const char* key) {
    const Json& value = get(key);
    if (!value.is_string() || value.get_ref<const std::string&>().empty())
      fail(quoted(path_of(key)), value, "a text that is not empty");
    return value.get<std::string>();
  }

  // Wide enough for any machine, and what is computed from them stays finite.
  double rate(const char* key) {
    return number(key, get(key), "a number from 1 to 1e30", [](double x) { return x >= 1 && x <= 1e30; });
  }

  double duration(const char* key) {
    return number(key, get(key), "seconds from 0 to 1e6", [](double x) { return x >= 0 && x <= 1e6; });
  }

  int64_t bytes(const char* key) { return integer(key, "an integer from 1 to 2^53", 0x1p53); }

  int64_t count(const char* key) { return integer(key, "an integer from 1 to 2^20", 0x1p20); }

  Members object(const char* key, const Json& value) const { return {value, path_of(key), file_}; }

  void expect_no_others() const {
    for (const auto& [key, value] : object_.items())
      if (std::ranges::find(known_, key) == known_.end())
        throw InputError(file_ + ": unknown key " + quoted(path_of(key)) + "; did you mean " +
                         quoted(path_of(nearest(key, known_))) + "?");
  }

 private:
  static std::string quoted(const std::string& text) { return "'" + text + "'"; }

  std::string path_of(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }

  [[noreturn]] void fail(const std::string& what, const Json& found, const char* wanted) const {
    throw InputError(file_ + ": " + what + " is " + config::describe_value(found) + "; wanted " + wanted);
  }

  int64_t integer(const char* key, const char* wanted, double most) {
    return static_cast<int64_t>(
        number(key, get(key), wanted, [&](double x) { return x >= 1 && x <= most && std::trunc(x) == x; }));
  }

  template <class Allowed>
  double number(const char* key, const Json& value, const char* wanted, const Allowed& allowed) const {
    const double number = value.is_number() ? value.get<double>() : NAN;
    if (!std::isfinite(number) || !allowed(number)) fail(quoted(path_of(key)), value, wanted);
    return number;
  }

  const Json& object_;
  std::string path_;
  const std::string& file_;
  std::vector<std::string> known_;
};

Hardware read(Members members) {
  Hardware hardware{.name = members.text("name"),
                    .source = members.text("source"),
                    .gemm_flops_per_s = members.rate("gemm_flops_per_s"),
                    .peak_flops_per_s = std::nullopt,
                    .attention_flops_per_s = members.rate("attention_flops_per_s"),
                    .memory_bytes_per_s = members.rate("memory_bytes_per_s"),
                    .kernel_s = members.duration("kernel_s"),
                    .memory_bytes = members.bytes("memory_bytes"),
                    .multiprocessors = 0,
                    .collective_ctas = 0,
                    .link = std::nullopt,
                    .network = std::nullopt};
  if (members.find("multiprocessors")) hardware.multiprocessors = members.count("multiprocessors");
  if (members.find("collective_ctas")) hardware.collective_ctas = members.count("collective_ctas");
  if (members.find("peak_flops_per_s")) hardware.peak_flops_per_s = members.rate("peak_flops_per_s");
  if (const Json* value = members.find("link")) {
    Members link = members.object("link", *value);
    hardware.link = {link.duration("latency_s"), link.rate("bytes_per_s"), link.count("ranks")};
    link.expect_no_others();
  }
  if (const Json* value = members.find("network")) {
    Members network = members.object("network", *value);
    hardware.network = {network.duration("latency_s"), network.rate("bytes_per_s")};
    network.expect_no_others();
  }
  members.expect_no_others();
  return hardware;
}

}  // namespace

std::vector<std::string> hardware_names() {
  std::vector<std::string> names;
  for (const HardwareFile& file : hardware_files()) names.emplace_back(file.name);
  return names;
}

Hardware hardware_by_name(std::string_view name) {
  for (const HardwareFile& file : hardware_files())
    if (file.name == name)
      return parse_hardware(file.text, "configs/hardware/" + std::string(name) + ".json");
  std::string all;
  for (const std::string& known : hardware_names()) all += (all.empty() ? "" : ", ") + known;
  throw UsageError("there is no hardware named '" + std::string(name) + "'; did you mean '" +
                   nearest(name, hardware_names()) + "'? Known are " + all +
                   "; anything else can be described in a file like those of configs/hardware");
}

Hardware load_hardware(const std::string& path) {
  return parse_hardware(read_text_file(path, "the hardware's description"), path);
}

Hardware find_hardware(const std::string& name_or_path) {
  const bool path = name_or_path.find_first_of("./") != std::string::npos;
  return path ? load_hardware(name_or_path) : hardware_by_name(name_or_path);
}

Hardware parse_hardware(std::string_view text, const std::string& name) {
  const Json document = config::parse_strict_json(text, name);
  // A report of `minillm bench` is about more than the hardware; its cases tell it from a description.
  if (!document.is_object() || !document.contains("cases")) return read({document, "", name});
  if (!document.contains("hardware"))
    throw InputError(name +
                     ": a report of `minillm bench` without the key 'hardware': it was written on the "
                     "simulated device, or --only left out attention. Measure all cases on a GPU");
  return read({document.at("hardware"), "hardware", name});
}

std::string to_json(const Hardware& hardware) {
  Json json = {{"name", hardware.name},
               {"source", hardware.source},
               {"gemm_flops_per_s", hardware.gemm_flops_per_s},
               {"attention_flops_per_s", hardware.attention_flops_per_s},
               {"memory_bytes_per_s", hardware.memory_bytes_per_s},
               {"kernel_s", hardware.kernel_s},
               {"memory_bytes", hardware.memory_bytes}};
  if (hardware.peak_flops_per_s) json["peak_flops_per_s"] = *hardware.peak_flops_per_s;
  if (hardware.multiprocessors > 0) json["multiprocessors"] = hardware.multiprocessors;
  if (hardware.collective_ctas > 0) json["collective_ctas"] = hardware.collective_ctas;
  if (const auto& link = hardware.link)
    json["link"] = {
        {"latency_s", link->latency_s}, {"bytes_per_s", link->bytes_per_s}, {"ranks", link->ranks}};
  if (const auto& network = hardware.network)
    json["network"] = {{"latency_s", network->latency_s}, {"bytes_per_s", network->bytes_per_s}};
  return json.dump(2);
}

}  // namespace minillm::shard
