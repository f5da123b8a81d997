#include "comm/affinity.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <set>
#include <vector>

#include "core/checked.h"

namespace minillm::comm {
namespace {

constexpr int kMostProcessors = 8192;

/// The processors that this thread may run on; none when Linux does not say.
std::vector<int> allowed_processors() {
  cpu_set_t* const set = CPU_ALLOC(kMostProcessors);
  const size_t bytes = CPU_ALLOC_SIZE(kMostProcessors);
  std::vector<int> processors;
  if (set != nullptr && sched_getaffinity(0, bytes, set) == 0)
    for (int processor = 0; processor < kMostProcessors; ++processor)
      if (CPU_ISSET_S(processor, bytes, set)) processors.push_back(processor);
  CPU_FREE(set);
  return processors;
}

Cores own_cores() {
  std::vector<int> present(static_cast<size_t>(std::max(sysconf(_SC_NPROCESSORS_CONF), 1L)));
  std::iota(present.begin(), present.end(), 0);
  return {.allowed = count_cores(allowed_processors()), .present = count_cores(present)};
}

}  // namespace

int count_cores(std::span<const int> processors, const std::string& topology) {
  std::set<std::string> cores;
  for (const int processor : processors) {
    const std::string name = "cpu" + std::to_string(processor);
    std::ifstream file(topology + "/" + name + "/topology/thread_siblings_list");
    std::string siblings;
    cores.insert(std::getline(file, siblings) && !siblings.empty() ? siblings : name);
  }
  return narrow<int>(cores.size());
}

std::string affinity_warning(std::span<const Cores> ranks) {
  const auto bound = [](const Cores& cores) { return cores.allowed == 1 && cores.present > 1; };
  const auto first = std::ranges::find_if(ranks, bound);
  if (first == ranks.end()) return "";
  const auto count = std::ranges::count_if(ranks, bound);
  const std::string rank = std::to_string(first - ranks.begin());
  return "warning: " +
         (count == 1 ? "rank " + rank + " is"
                     : std::to_string(count) + " of " + std::to_string(ranks.size()) +
                           " ranks, the first is " + rank + ", are each") +
         " bound to one core of " + std::to_string(first->present) +
         ", on which threads have to take turns: start with mpirun --bind-to none, srun --cpu-bind=none";
}

std::string affinity_warning(Bootstrap& bootstrap) {
  const Cores mine = own_cores();
  std::vector<Cores> all(static_cast<size_t>(bootstrap.size()));
  bootstrap.gather(bootstrap.everyone(), std::as_bytes(std::span(&mine, 1)),
                   std::as_writable_bytes(std::span(all)));
  return bootstrap.rank() == 0 ? affinity_warning(all) : "";
}

}  // namespace minillm::comm
