#include "comm/path.h"

#include <cstdlib>

namespace minillm::comm {
namespace {

constexpr int kSymmetricWindows = 22700;  // NCCL's version that brought them
constexpr int kCopyEngines = 22800;       // and these, within a node
constexpr int kCopyEnginesAcrossNodes = 23006;
constexpr int kDriverForCopyEngines = 12050;

std::string nccl_name(int version) {
  return "NCCL " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string driver_name(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// Why nothing is done in symmetric windows; empty when something is.
std::string window_obstacle(const PathFacts& facts) {
  if (facts.nccl_version < kSymmetricWindows) return "they need " + nccl_name(kSymmetricWindows);
  if (!facts.disabled_by.empty()) return facts.disabled_by + " is set";
  if (!facts.peer_access) return "the devices have no peer access";
  return facts.no_window;
}

std::string on_nodes(const PathFacts& facts) {
  return "the ranks are on " + std::to_string(facts.nodes) + " nodes, they have to be on one";
}

std::string copy_engine_obstacle(const PathFacts& facts) {
  if (facts.nccl_version < kCopyEngines) return "they need " + nccl_name(kCopyEngines);
  if (facts.nodes > 1 && facts.nccl_version < kCopyEnginesAcrossNodes) return on_nodes(facts);
  if (facts.driver_version < kDriverForCopyEngines)
    return "the driver is for " + driver_name(facts.driver_version) + ", they need one for " +
           driver_name(kDriverForCopyEngines);
  return window_obstacle(facts);
}

std::string kernel_obstacle(const PathFacts& facts) {
  return facts.nodes > 1 ? on_nodes(facts) : window_obstacle(facts);
}

}  // namespace

std::string windows_disabled_by() {
  for (const char* variable : {"NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE"})
    if (const char* value = std::getenv(variable); value && std::string(value) == "0")
      return std::string(variable) + "=0";
  return "";
}

std::string describe_path(const PathFacts& facts) {
  const std::string version = " (" + nccl_name(facts.nccl_version) + ")";
  if (facts.ranks == 1) return "one rank, nothing is sent" + version;
  const std::string kernels =
      "NCCL's kernels" +
      (facts.max_ctas > 0 ? " on at most " + std::to_string(facts.max_ctas) + " CTAs" : std::string());
  const std::string obstacle = facts.zero_ctas ? copy_engine_obstacle(facts) : kernel_obstacle(facts);
  if (!obstacle.empty())
    return kernels + (facts.zero_ctas ? "; no copy engines: " : "; no symmetric windows: ") + obstacle +
           version;
  return (facts.zero_ctas ? "copy engines" : kernels) + " in symmetric windows" + version;
}

}  // namespace minillm::comm
