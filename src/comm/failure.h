// How an error on one rank ends a job.
#pragma once

#include <exception>
#include <string>

#include "comm/bootstrap.h"
#include "core/error.h"

namespace minillm::comm {

/// The exit code of an error: its own for minillm::Error, ExitCode::kMemory where the host has no memory
/// left, ExitCode::kInternal for others.
ExitCode exit_code(const std::exception& error);
/// What happened, in words.
std::string describe(const std::exception& error);

/// Prints "[rank r] error: …" and ends all ranks with the error's exit code; never returns. Most errors are
/// the same on all ranks, so rank 0 tells at once and the others a second later, by when rank 0 has ended
/// them.
///
/// Where collectives may be in flight this has to be called before the stack unwinds: destroying streams and
/// communicators waits for peers, which wait for this rank.
[[noreturn]] void end_job(Bootstrap& bootstrap, const std::exception& error);

/// Runs `body`. An error in it ends the job, as above, where there are other ranks; alone it is thrown on.
template <class Body>
void or_end_job(Bootstrap& bootstrap, Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    if (bootstrap.size() > 1) end_job(bootstrap, error);
    throw;
  }
}

}  // namespace minillm::comm
