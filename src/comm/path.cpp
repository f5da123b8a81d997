#include "comm/path.h"

#include <string.h>  // strcasestr

#include <cstdlib>
#include <initializer_list>

namespace minillm::comm {
namespace {

constexpr int kSymmetricWindows = 22700;  // NCCL's version that brought them
constexpr int kCopyEngines = 22800;       // and these, within a node
constexpr int kCopyEnginesAcrossNodes = 23006;
constexpr int kDriverForCopyEngines = 12050;

/// Versions of NCCL: from `first` to before `mended`.
struct Fault {
  int first, mended;
  bool in(int version) const { return first <= version && version < mended; }
};
constexpr Fault kKernelsDoNotWait{22800, 23007};
constexpr Fault kTwoRanksHang{22907, 23102};
constexpr Fault kGraphsDeadlock{0, 23004};

// The devices whose kernels can start before the one ahead ends; also those that copy engines signal by
// multicast.
constexpr int kHopper = 90;
constexpr int kBlackwell = 100;

std::string nccl_name(int version) {
  return "NCCL " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string driver_name(int version) {
  return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

bool kernels_do_not_wait(const PathFacts& facts) {
  return facts.compute_capability >= kHopper && kKernelsDoNotWait.in(facts.nccl_version);
}

bool two_ranks_hang(const PathFacts& facts) {
  return facts.compute_capability >= kHopper && facts.node_ranks == 2 && kTwoRanksHang.in(facts.nccl_version);
}

std::string hang() {
  return "two ranks of a node may wait for each other for ever, which " + nccl_name(kTwoRanksHang.mended) +
         " mends";
}

/// Why nothing is done in symmetric windows, whatever is registered; empty when something may be.
std::string window_obstacle(const PathFacts& facts) {
  if (facts.nccl_version < kSymmetricWindows) return "they need " + nccl_name(kSymmetricWindows);
  if (!facts.windows_off_by.empty()) return facts.windows_off_by + " is set";
  if (!facts.peer_access) return "the devices have no peer access";
  if (!facts.virtual_memory) return "a device has no virtual memory management";
  return "";
}

std::string on_nodes(const PathFacts& facts) {
  return "the ranks are on " + std::to_string(facts.nodes) + " nodes, they have to be on one";
}

std::string copy_engine_obstacle(const PathFacts& facts) {
  if (facts.nccl_version < kCopyEngines) return "they need " + nccl_name(kCopyEngines);
  // Across nodes they want a network that cannot be seen from here, and fall back to kernels without it.
  if (facts.nodes > 1 && (facts.nccl_version < kCopyEnginesAcrossNodes || kernels_do_not_wait(facts)))
    return on_nodes(facts);
  if (facts.driver_version < kDriverForCopyEngines)
    return "the driver is for " + driver_name(facts.driver_version) + ", they need one for " +
           driver_name(kDriverForCopyEngines);
  if (!facts.copy_engines_off_by.empty()) return facts.copy_engines_off_by + " is set";
  if (two_ranks_hang(facts)) return hang();
  return window_obstacle(facts);
}

/// Why a window would do harm, or an empty string.
std::string window_fault(const PathFacts& facts, bool kernels) {
  if (kernels && kernels_do_not_wait(facts))
    return "kernels may read them too early, which " + nccl_name(kKernelsDoNotWait.mended) + " mends";
  if (two_ranks_hang(facts) && facts.compute_capability >= kBlackwell) return hang();
  return "";
}

std::string first_of(std::initializer_list<std::string> reasons) {
  for (const std::string& reason : reasons)
    if (!reason.empty()) return reason;
  return "";
}

std::string kernels_text(const PathFacts& facts, const std::string& no_copies,
                         const std::string& no_windows) {
  std::string text = "NCCL's kernels";
  if (facts.max_ctas > 0) text += " on at most " + std::to_string(facts.max_ctas) + " CTAs";
  if (no_windows.empty()) text += " in symmetric windows";
  if (!no_copies.empty()) text += "; no copy engines: " + no_copies;
  if (!no_windows.empty() && no_windows != no_copies) text += "; no symmetric windows: " + no_windows;
  return text;
}

}  // namespace

Path choose_path(const PathFacts& facts) {
  const std::string version = " (" + nccl_name(facts.nccl_version) + ")";
  if (facts.ranks == 1) return {.zero_ctas = facts.zero_ctas, .text = "one rank, nothing is sent" + version};
  const std::string obstacle = copy_engine_obstacle(facts);
  const bool copies = facts.zero_ctas && obstacle.empty();
  const std::string fault = window_fault(facts, /*kernels=*/!copies);
  Path path{.zero_ctas = facts.zero_ctas && !two_ranks_hang(facts), .window = fault.empty()};
  if (copies && facts.no_window.empty()) {
    path.text = "copy engines in symmetric windows" + version;
    return path;
  }
  const std::string no_copies = !facts.zero_ctas ? "" : copies ? facts.no_window : obstacle;
  const std::string no_windows =
      first_of({facts.nodes > 1 ? on_nodes(facts) : "", window_obstacle(facts), fault, facts.no_window});
  path.text = kernels_text(facts, no_copies, no_windows) + version;
  return path;
}

std::string graph_remark(const PathFacts& facts) {
  if (facts.nodes == 1 || !kGraphsDeadlock.in(facts.nccl_version)) return "";
  return "a CUDA graph with collectives between nodes may deadlock with " + nccl_name(facts.nccl_version) +
         ": if steps time out, use " + nccl_name(kGraphsDeadlock.mended) +
         " or newer, or set train.cuda_graph=false";
}

std::string windows_off_by() {
  for (const char* variable : {"NCCL_WIN_ENABLE", "NCCL_CUMEM_ENABLE"})
    if (const char* value = std::getenv(variable); value && std::string(value) == "0")
      return std::string(variable) + "=0";
  return "";
}

// A number, of which 2 asks for copy engines, or names with "|" between them.
std::string copy_engines_off_by() {
  const char* const value = std::getenv("NCCL_CTA_POLICY");
  if (value == nullptr || *value == '2' || strcasestr(value, "zero") != nullptr) return "";
  return std::string("NCCL_CTA_POLICY=") + value;
}

}  // namespace minillm::comm
