// What to change where a plan does not fit.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.h"
#include "train/step_plan.h"

namespace minillm::train {

/// Sentences for people: the largest train.micro_batch of which the plan takes at most `bytes`, and the
/// settings that cost least time among those that would fit as it is.
std::string advise_on_memory(const config::Config& config, const World& world, int64_t bytes);

}  // namespace minillm::train
