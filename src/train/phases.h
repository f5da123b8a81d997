// The phases of a run: what the watchdog calls them, and the limit that each takes from the configuration.
#pragma once

#include <cstdint>
#include <string>

#include "comm/phase.h"
#include "config/config.h"

namespace minillm::train {

/// "start-up (reading initial values)".
comm::Phase start_up(const config::Config& config, const std::string& part);
/// Start-up that runs a step, such as the first, in which modules are loaded and graphs captured: it may take
/// the time of both.
comm::Phase start_up_with_step(const config::Config& config, const std::string& part);
comm::Phase step(const config::Config& config, int64_t number);
/// Printing what step `number` gave, and adding it to metrics.jsonl.
comm::Phase reporting(const config::Config& config, int64_t number);
/// Of all ranks; all but rank 0 wait for it.
comm::Phase saving(const config::Config& config, const std::string& path, int rank);
/// After all work is done.
comm::Phase ending(const config::Config& config);

}  // namespace minillm::train
