// Trains two steps with one wait left out, for ThreadSanitizer to find: `train_fault gather` drops a forward
// pass's wait for its weights, `train_fault reduce` a reduce-scatter's wait for its gradients, `train_fault
// update` a norm's wait for the reduced gradients, `train_fault none` nothing. `train_fault error` throws on
// rank 1 while the trainer is made: that has to end the job, not to wait in communicators that are destroyed.
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "support.h"

namespace {

using minillm::shard::OpKind;

void drop(const minillm::shard::Schedule& schedule, std::vector<std::vector<minillm::shard::Wait>>& waits,
          OpKind waiting, OpKind awaited) {
  for (size_t i = 0; i < waits.size(); ++i) {
    if (schedule.operations[i].kind != waiting) continue;
    const auto dropped = std::erase_if(waits[i], [&](const minillm::shard::Wait& wait) {
      return wait.steps_back == 0 && schedule.operations[static_cast<size_t>(wait.operation)].kind == awaited;
    });
    if (dropped > 0) return;
  }
  throw minillm::InternalError("the schedule has no such wait");
}

}  // namespace

int main(int argc, char** argv) {
  const char* fault = argc > 1 ? argv[1] : "none";
  const auto world = minillm::comm::make_bootstrap(&argc, &argv);
  minillm::config::Config config = minillm::testing::tiny_config();
  config.train.micro_batch = 2;
  minillm::train::TrainerOptions options;
  options.edit_waits = [&](const auto& schedule, auto& waits) {
    if (std::strcmp(fault, "error") == 0 && world->rank() == 1) throw minillm::InputError("planted");
    if (std::strcmp(fault, "gather") == 0) drop(schedule, waits, OpKind::kForward, OpKind::kGather);
    if (std::strcmp(fault, "reduce") == 0) drop(schedule, waits, OpKind::kReduceScatter, OpKind::kBackward);
    if (std::strcmp(fault, "update") == 0) drop(schedule, waits, OpKind::kSquareNorm, OpKind::kReduceScatter);
  };
  minillm::train::Trainer trainer(config, *world, options);
  minillm::testing::train_losses(trainer, config, world->rank(), 2);
  if (world->rank() == 0) std::printf("trained with fault %s\n", fault);
}
