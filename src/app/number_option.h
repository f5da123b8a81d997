// Options whose values are numbers, in decimal notation: the library behind the command line would take "010"
// for 8, and "nan" for a number in any range.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <type_traits>

#include "config/schema.h"
#include "core/error.h"
#include "core/number.h"

namespace minillm::app {

/// Adds an option that sets `value`, an integer or a double with config::Integer or config::Real as what is
/// allowed. Other text is a UsageError that names the option, the text and what is allowed. `value` has to
/// outlive the command.
template <typename Number, typename Allowed>
CLI::Option* add_number(CLI::App& command, const std::string& name, Number& value, const Allowed& allowed,
                        const std::string& description) {
  using Parsed = std::conditional_t<std::is_integral_v<Number>, int64_t, double>;
  const auto set = [name, allowed, &value](const std::string& text) {
    const auto number = parse_number<Parsed>(text);
    if (!number || !allowed.allows(*number))
      throw UsageError(name + " is '" + text + "'; wanted " + allowed.wanted());
    value = static_cast<Number>(*number);
  };
  return command.add_option_function<std::string>(name, set, description)->type_name("N");
}

}  // namespace minillm::app
