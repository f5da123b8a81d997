// Whether a plan fits the device, and what to change where it does not.
#pragma once

#include <cstdint>
#include <string>

#include "config/config.h"
#include "core/error.h"
#include "cuda/memory.h"
#include "train/step_plan.h"

namespace minillm::train {

/// Sentences for people: the largest train.micro_batch of which the plan takes at most `bytes`, and the
/// settings that cost least time among those that would fit as it is.
std::string advise_on_memory(const config::Config& config, const World& world, int64_t bytes);

/// Throws MemoryError, with the table of the plan and what to change, unless the plan fits what
/// memory.reserve and memory.limit leave of a device on which this process has its context and nothing else
/// yet.
void require_fit(const StepPlan& plan, const World& world, const cuda::DeviceCapacity& capacity);

/// The error when the plan fitted `before`, but its memory could not be had for the reason `refusal`: what
/// was made in between, communicators above all, took more than memory.reserve.
MemoryError reserve_too_small(const StepPlan& plan, const World& world, const std::string& refusal,
                              const cuda::DeviceCapacity& before, const cuda::DeviceCapacity& now);

}  // namespace minillm::train
