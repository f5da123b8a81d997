#include "config/strict_json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/error.h"

namespace minillm::config {
namespace {

using Json = nlohmann::ordered_json;

/// What copies and prints values calls itself for each level, and the stack is finite.
constexpr int kDeepest = 64;

/// Parser callback that counts levels and keeps the keys of every open object.
class Strictness {
 public:
  explicit Strictness(const std::string& name) : name_(name) {}

  bool operator()(int depth, Json::parse_event_t event, Json& value) {
    if (depth > kDeepest)
      throw InputError(name_ + ": values are nested more than " + std::to_string(kDeepest) + " deep");
    if (event == Json::parse_event_t::object_start) {
      open_.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      open_.pop_back();
    } else if (event == Json::parse_event_t::key) {
      Object& object = open_.back();
      object.current = value.get<std::string>();
      if (!object.keys.insert(object.current).second)
        throw InputError(name_ + ": the key '" + path() + "' appears twice; remove one of them");
    }
    return true;
  }

 private:
  struct Object {
    std::set<std::string> keys;
    std::string current;
  };

  std::string path() const {
    std::string path;
    for (const Object& object : open_) path += (path.empty() ? "" : ".") + object.current;
    return path;
  }

  const std::string& name_;
  std::vector<Object> open_;
};

/// The library's message from its position on: "line 3, column 5: syntax error while parsing …".
std::string reason(const Json::exception& error) {
  std::string what = error.what();
  for (const std::string marker : {"parse error at ", "] "})
    if (const size_t at = what.find(marker); at != std::string::npos) return what.substr(at + marker.size());
  return what;
}

}  // namespace

Json parse_strict_json(std::string_view text, const std::string& name) {
  if (text.empty()) throw InputError(name + ": not valid JSON: it is empty");
  // The library takes NUL for the end of the text and would not look at what follows.
  if (const size_t at = text.find('\0'); at != std::string_view::npos)
    throw InputError(name + ": not valid JSON: byte " + std::to_string(at) + " is NUL");
  try {
    return Json::parse(text, Strictness(name));
  } catch (const Json::exception& error) {
    throw InputError(name + ": not valid JSON: " + reason(error));
  }
}

std::string describe_value(const Json& value) {
  if (value.is_null()) return "null";
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  constexpr size_t kLongest = 80;
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "…";
  if (value.is_string()) return text + " (a string)";
  if (value.is_boolean()) return text + " (a boolean)";
  return text + (value.is_number_float() ? " (a number)" : " (an integer)");
}

}  // namespace minillm::config
