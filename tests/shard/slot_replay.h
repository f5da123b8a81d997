// A schedule on paper: runs its list for a few steps with slots that know what they hold, and complains of
// the first operation that does not find what it needs. Knows what a step has to do, but not how the builder
// arranges it.
#pragma once

#include <string>

#include "shard/builder.h"
#include "shard/layout.h"
#include "shard/schedule.h"

namespace minillm::shard {

/// The first fault of the schedule of that layout and policy, as a sentence; empty when there is none.
/// Demands that
/// - passes run in the order of the model and find the weights of their step;
/// - a gather finds its unit updated and fills a slot for the pass that reads it next, with weights that no
///   slot holds;
/// - gradients are not overwritten before they are reduced, nor reduced ones before the update (before the
///   end of the step with Policy::keep_gradients);
/// - every segment of every unit is reduced once per micro-batch (or once, of unreduced sums), summed over
///   replicas, measured and updated once;
/// - scalars are complete before they are used;
/// - every slot is long enough, and every slot, shard and scalar that an operation uses is in its regions.
std::string find_fault(const Schedule& schedule, const Layout& layout, const Policy& policy);

}  // namespace minillm::shard
