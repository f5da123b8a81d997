#include "config/config.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "config/schema.h"
#include "config/strict_json.h"
#include "core/edit_distance.h"
#include "core/error.h"
#include "core/text_file.h"

namespace minillm::config {
namespace {

using Json = nlohmann::ordered_json;

/// A value for a key and where it was written: the file, or the --set argument.
struct Setting {
  Json value;
  std::string origin;
};
using Settings = std::map<std::string, Setting>;  // by path

std::vector<std::string> all_keys() {
  std::vector<std::string> keys;
  for_each_key(Config{}, [&](const char* path, auto&&...) { keys.push_back(path); });
  return keys;
}

bool is_key(const std::string& path) {
  return std::ranges::count(all_keys(), path) > 0;
}

/// Keys below `path`: empty when it is not the name of an object.
std::vector<std::string> keys_below(const std::string& path) {
  std::vector<std::string> keys = all_keys();
  std::erase_if(keys, [&](const std::string& key) { return !key.starts_with(path + "."); });
  return keys;
}

std::string_view last_part(std::string_view path) {
  return path.substr(path.rfind('.') + 1);
}

/// The key whose path, or whose name in another object, takes the fewest changes.
std::string nearest_key(const std::string& path) {
  auto distance = [&](const std::string& key) {
    return std::min(edit_distance(path, key), 1 + edit_distance(last_part(path), last_part(key)));
  };
  return std::ranges::min(all_keys(), {}, distance);
}

[[noreturn]] void unknown_key(const std::string& origin, const std::string& path) {
  throw UsageError(origin + ": unknown key '" + path + "'; did you mean '" + nearest_key(path) +
                   "'? `minillm config --describe` lists all keys");
}

[[noreturn]] void wrong_value(const std::string& origin, const std::string& path, const Json& found,
                              const std::string& wanted) {
  throw UsageError(origin + ": '" + path + "' is " + describe_value(found) + "; wanted " + wanted);
}

/// Adds the leaves of `object` (the file's object at `path`, "" for the whole) to `settings`.
void collect(const Json& object, const std::string& path, const std::string& name, Settings& settings) {
  for (const auto& [key, value] : object.items()) {
    if (key.find('.') != std::string::npos)
      throw UsageError(name + ": key '" + key + "' contains a dot; in a file, write nested objects");
    const std::string below = path.empty() ? key : path + "." + key;
    if (is_key(below)) {
      settings[below] = {value, name};
    } else if (keys_below(below).empty()) {
      unknown_key(name, below);
    } else if (!value.is_object()) {
      wrong_value(name, below, value, "an object with keys such as '" + keys_below(below).front() + "'");
    } else {
      collect(value, below, name, settings);
    }
  }
}

/// JSON if `text` is JSON, else the text itself.
Json override_value(const std::string& text, const std::string& origin) try {
  return parse_strict_json(text, origin);
} catch (const InputError&) {
  Json value = text;
  try {
    static_cast<void>(value.dump());
  } catch (const Json::exception&) {
    throw UsageError(origin + ": the value is not valid UTF-8");
  }
  return value;
}

void apply_override(const std::string& argument, Settings& settings) {
  const std::string origin = "--set " + argument;
  const size_t equals = argument.find('=');
  if (equals == std::string::npos)
    throw UsageError(origin + ": there is no '='; write --set KEY=VALUE, e.g. --set train.steps=20");
  const std::string path = argument.substr(0, equals);
  if (const auto below = keys_below(path); !below.empty()) {
    throw UsageError(origin + ": '" + path + "' is an object; set its keys one by one, e.g. --set " +
                     below.front() + "=VALUE");
  }
  if (!is_key(path)) unknown_key(origin, path);
  settings[path] = {override_value(argument.substr(equals + 1), origin), origin};
}

/// Converters from JSON: false when the type is not the member's.
bool convert(const Json& value, int64_t& member) {
  if (value.is_number_float()) {  // 20.0 and 1e3 are integers to whoever writes them
    const double number = value.get<double>();
    if (std::trunc(number) != number || std::abs(number) >= 0x1p63) return false;
    member = static_cast<int64_t>(number);
    return true;
  }
  if (value.is_number_unsigned() && !std::in_range<int64_t>(value.get<uint64_t>())) return false;
  if (!value.is_number_integer()) return false;
  member = value.get<int64_t>();
  return true;
}

bool convert(const Json& value, double& member) {
  if (!value.is_number()) return false;
  member = value.get<double>();
  return true;
}

bool convert(const Json& value, bool& member) {
  if (!value.is_boolean()) return false;
  member = value.get<bool>();
  return true;
}

bool convert(const Json& value, std::string& member) {
  if (!value.is_string()) return false;
  member = value.get<std::string>();
  return member.find('\0') == std::string::npos;  // the system would take the part before it for the name
}

bool convert(const Json& value, DType& member) {
  for (const DType type : {DType::kBf16, DType::kFp32}) {
    if (value != name_of(type)) continue;
    member = type;
    return true;
  }
  return false;
}

bool convert(const Json& value, Recompute& member) {
  for (const Recompute mode : {Recompute::kNone, Recompute::kCheap, Recompute::kBlock}) {
    if (value != name_of(mode)) continue;
    member = mode;
    return true;
  }
  return false;
}

bool convert(const Json& value, std::vector<Recompute>& member) {
  member.clear();
  const Json list = value.is_array() ? value : Json::array({value});
  return std::ranges::all_of(list,
                             [&](const Json& element) { return convert(element, member.emplace_back()); });
}

template <typename T>
Json to_value(const T& member) {
  if constexpr (std::is_same_v<T, std::vector<Recompute>>) {
    Json list = Json::array();
    for (const Recompute mode : member) list.push_back(name_of(mode));
    return list.size() == 1 ? list.front() : list;
  } else if constexpr (std::is_same_v<T, DType>) {
    return name_of(member);
  } else {
    return member;
  }
}

/// Visitor that fills the members for which there is a setting.
auto assign(const Settings& settings) {
  return [&settings](const char* path, auto& member, const auto& allowed, const char* /*meaning*/) {
    const auto found = settings.find(path);
    if (found == settings.end()) return;
    const auto& [value, origin] = found->second;
    if (!convert(value, member) || !allowed.allows(member))
      wrong_value(origin, path, value, allowed.wanted());
  };
}

/// Visitor that writes the members into `document`.
auto print_into(Json& document) {
  return [&document](const std::string& path, const auto& member, auto&&...) {
    std::string pointer = "/" + path;
    std::ranges::replace(pointer, '.', '/');
    document[Json::json_pointer(pointer)] = to_value(member);
  };
}

void resolve_defaults(Model& model) {
  if (model.ffn_dim == 0) model.ffn_dim = 4 * model.dim;
}

Json parse_object(const std::string& text, const std::string& name) {
  Json document = parse_strict_json(text, name);
  if (!document.is_object())
    throw UsageError(name + ": the file holds " + describe_value(document) + "; wanted an object { … }");
  return document;
}

}  // namespace

const char* name_of(Recompute mode) {
  return mode == Recompute::kNone ? "none" : mode == Recompute::kCheap ? "cheap" : "block";
}

std::string Memory::recompute_summary() const {
  if (recompute.size() == 1) return name_of(recompute.front());
  std::string text;
  for (auto run = recompute.begin(); run != recompute.end();) {
    const auto end = std::find_if(run, recompute.end(), [&](Recompute mode) { return mode != *run; });
    text += (text.empty() ? "" : ", ") + std::to_string(end - run) + "x " + name_of(*run);
    run = end;
  }
  return text;
}

Config load(const std::string& path, const std::vector<std::string>& overrides) {
  return parse(read_text_file(path, "the configuration"), path, overrides);
}

Config parse(const std::string& text, const std::string& name, const std::vector<std::string>& overrides) {
  Settings settings;
  collect(parse_object(text, name), "", name, settings);
  for (const std::string& argument : overrides) apply_override(argument, settings);
  Config config;
  for_each_key(config, assign(settings));
  resolve_defaults(config.model);
  check_config(config, name);
  return config;
}

std::string to_json(const Config& config) {
  Json document;
  for_each_key(config, print_into(document));
  return document.dump(2);
}

std::string model_to_json(const Model& model) {
  Json document;
  for_each_model_key(model, print_into(document));
  return document.at("model").dump();
}

Model model_from_json(const std::string& text, const std::string& name) try {
  Settings settings;
  collect(parse_object(text, name), "model", name, settings);
  Model model;
  for_each_model_key(model, assign(settings));
  resolve_defaults(model);
  check_model(model, name);
  return model;
} catch (const UsageError& error) {
  throw InputError(error.what());  // nobody typed it: the file is wrong
}

std::vector<KeyValue> key_values(const Config& config) {
  std::vector<KeyValue> all;
  for_each_key(config, [&](const char* path, const auto& member, const auto& allowed, const char*) {
    all.push_back({path, to_value(member).dump(), is_by_rank(allowed)});
  });
  return all;
}

std::string describe() {
  std::string text;
  for_each_key(Config{}, [&](const char* path, const auto& member, const auto& allowed, const char* meaning) {
    text += std::string(path) + " (default " + to_value(member).dump() + ")\n    " + meaning + "\n    " +
            allowed.wanted() + (is_by_rank(allowed) ? "; may differ by rank" : "") + "\n";
  });
  return text;
}

}  // namespace minillm::config
