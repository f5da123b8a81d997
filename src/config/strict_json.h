// JSON text that people and other programs wrote, read without tolerance: no comments, no repeated keys,
// no NUL, no more levels than a program has a use for.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace minillm::config {

/// Parses one JSON value. Throws InputError "NAME: …" with line and column for a syntax error, with the key
/// and its path for a key that appears twice in one object, for NUL bytes and for more than 64 levels.
nlohmann::ordered_json parse_strict_json(std::string_view text, const std::string& name);

/// What a value is, for errors: "20 (an integer)", "an object"; long texts are cut.
std::string describe_value(const nlohmann::ordered_json& value);

}  // namespace minillm::config
