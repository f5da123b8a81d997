// A training run from configuration to saved weights.
#pragma once

#include <string>

#include "comm/bootstrap.h"
#include "config/config.h"

namespace minillm::train {

struct RunOptions {
  std::string log_dir = {};  ///< where metrics.jsonl is appended to; empty: nowhere
  std::string program = {};  ///< name and version, which all ranks have to have the same of
};

/// Trains on all ranks of `bootstrap` (one device each), rank 0 prints. Errors are thrown on the rank that
/// meets them, before there are communicators; later they end the job. What rank 0 prints holds up no step
/// where nobody reads it; at the end the run waits for the reader. Throws InputError when standard output
/// cannot be written.
void run(const config::Config& config, comm::Bootstrap& bootstrap, const RunOptions& options);

}  // namespace minillm::train
