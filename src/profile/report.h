// Costs and times of cases, as a table for people and as JSON.
#pragma once

#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "profile/cases.h"
#include "profile/roofline.h"

namespace minillm::profile {

struct Times {
  Roofline roofline = {};
  int repeats = 0;
  std::vector<double> seconds = {};  ///< of a call, by case

  /// Of all calls in a step.
  double step_s(const std::vector<Case>& cases) const;
};

/// Without `times`, counts only.
struct Report {
  config::Config config;
  int ranks = 1;
  std::vector<Case> cases = {};
  std::optional<Times> times = {};
};

void print_table(const Report& report, std::ostream& out);

/// The format is documented in docs/formats.md.
std::string to_json(const Report& report);

}  // namespace minillm::profile
