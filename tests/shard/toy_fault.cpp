// Runs the toy with one wait left out, for ThreadSanitizer to find: `toy_fault SHARDS WAITING AWAITED` names
// the ranks that share a model and the kinds of two operations (name_of); the first of the one kind loses its
// waits for the other. `toy_fault SHARDS` leaves out nothing.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/error.h"
#include "ranks.h"
#include "toy.h"
#include "toy_policies.h"

namespace minillm::shard {
namespace {

void drop(const Schedule& schedule, std::vector<std::vector<Wait>>& waits, const std::string& waiting,
          const std::string& awaited) {
  for (size_t i = 0; i < waits.size(); ++i) {
    if (name_of(schedule.operations[i].kind) != waiting) continue;
    const auto dropped = std::erase_if(waits[i], [&](const Wait& wait) {
      return name_of(schedule.operations[static_cast<size_t>(wait.operation)].kind) == awaited;
    });
    if (dropped > 0) return;
  }
  throw InternalError("toy_fault: no '" + waiting + "' waits for a '" + awaited + "'");
}

void run(comm::Bootstrap& world, int shards, const char* waiting, const char* awaited) {
  const Layout layout = toy_layout(shards);
  const Policy policy{.replicas = world.size() / shards, .deferred_blocks = 1};
  const OwnedCommunicators communicators(shards, world);
  const ToyProgram program(layout, policy, world.rank(), DType::kBf16, 0);
  const Schedule schedule = build_schedule(layout, program, policy);
  std::vector<std::vector<Wait>> waits = derive_waits(schedule);
  if (waiting != nullptr) drop(schedule, waits, waiting, awaited);
  run_toy(layout, {policy, DType::kBf16, 2, world.rank(), communicators.get()}, &waits);
  if (world.rank() == 0) std::printf("ran to the end\n");
}

}  // namespace
}  // namespace minillm::shard

int main(int argc, char** argv) {
  const auto world = minillm::comm::make_bootstrap(&argc, &argv);
  if (argc != 2 && argc != 4) return 2;
  minillm::shard::run(*world, std::atoi(argv[1]), argc == 4 ? argv[2] : nullptr,
                      argc == 4 ? argv[3] : nullptr);
}
