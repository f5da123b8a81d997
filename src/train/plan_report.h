// What a plan says, for people and as JSON.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "shard/hardware.h"
#include "train/evaluation.h"

namespace minillm::train {

/// Lines on the model and the hardware, on how the step is ordered, and on slots.
std::string plan_header(const Evaluation& evaluation, const shard::Hardware& hardware);

/// Memory by purpose, bytes on the wire, times: a column for each evaluation. Below it what the last one goes
/// without, and what to change where the first does not fit.
std::string plan_table(std::span<const Evaluation* const> evaluations, const shard::Hardware& hardware);

/// The operations in the order of issue: stream, what and where, and what each waits for.
std::string schedule_listing(const Evaluation& evaluation);

/// The format is documented in docs/formats.md. `peer`: the evaluation that it is compared with, or null.
std::string plan_json(const Evaluation& evaluation, const shard::Hardware& hardware, const Evaluation* peer);

}  // namespace minillm::train
