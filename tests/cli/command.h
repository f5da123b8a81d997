// Runs the program as a user does, alone or under mpirun, and captures what it says.
#pragma once

#include <chrono>
#include <initializer_list>
#include <ostream>
#include <string>
#include <vector>

#include "core/error.h"

namespace minillm::test {

struct Result {
  int exit_code = 0;  ///< 128 + signal for a program that a signal ended
  bool timed_out = false;
  std::string out, err;
};
/// What GoogleTest prints beside a failed expectation.
std::ostream& operator<<(std::ostream& stream, const Result& result);

inline constexpr std::chrono::seconds kPatience{120};

/// Runs `command` (a path and its arguments) to its end; ends it after `patience`.
Result run(const std::vector<std::string>& command, std::chrono::seconds patience = kPatience);

/// Runs minillm with these arguments.
Result minillm(const std::vector<std::string>& arguments);
/// The same on `ranks` ranks of one machine; more than one need MPI.
Result minillm_on(int ranks, const std::vector<std::string>& arguments);

/// The exit code, and these parts in what it says on stderr.
void expect_failed(const Result& result, ExitCode code, std::initializer_list<std::string> parts);

/// How often `part` occurs in `text`.
int count(const std::string& text, const std::string& part);

}  // namespace minillm::test
