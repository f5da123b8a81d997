// How long an operation takes on given hardware when nothing shares the machine with it.
//
// Goals: enough to compare schedules and policies. Non-goals: how well one kernel runs (what a large copy and
// a large product reach is taken for all).
//
// A kernel takes kernel_s and then as long as its bytes (all that it moves) or, if longer, its floating-point
// operations; those of kernels that are neither products nor attention cost nothing beyond their bytes.
//
// A collective of n ranks sends n - 1 of n parts of the full buffer, an all-reduce twice that, at the group's
// bus bandwidth: the link's within a node; between nodes that of the group's ranks of a node together, at
// most the link's. Before that passes the latency of a kernel and of its hops, counted as NCCL's own cost
// model does (src/graph/tuning.cc). With m nodes: for a gather or reduce-scatter the n - 1 of a ring, of
// which m - 1 lead to another node; for an all-reduce, up and down a tree over nodes of chains within, twice
// n/m - 1 and log2(m). Sums of scalars have that latency and no bytes.
//
// A collective is a kernel of as many thread blocks as NCCL, or the configuration, gives it, each of which
// has a multiprocessor to itself (shard/timeline.h); sums of scalars have one. Gathers that copy engines
// carry have none: those within a node, where the configuration asks for it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/dtype.h"
#include "shard/hardware.h"
#include "shard/layout.h"
#include "shard/program.h"
#include "shard/schedule.h"

namespace minillm::shard {

/// What operations that run at the same time share.
enum class Resource : uint8_t {
  kDevice,   ///< multiprocessors and memory: kernels and copies
  kLink,     ///< collectives within a node
  kNetwork,  ///< collectives between nodes
};
inline constexpr int kResourceCount = 3;

struct OperationCost {
  Resource resource = Resource::kDevice;
  double latency_s = 0;    ///< before it uses its resource; what else is in flight does not change it
  double busy_s = 0;       ///< that it then has all of the resource, or longer with a part of it
  int64_t wire_bytes = 0;  ///< sent by a rank
  int64_t ctas = 0;        ///< of a collective that is a kernel: multiprocessors that it takes, at least 1
};

/// How the communicators of a run are made: what the configuration's keys of these names say.
struct CollectiveSettings {
  int64_t gather_ctas = 0, reduce_ctas = 0;  ///< at most; 0: NCCL chooses
  bool copy_engines = false;
};

/// Whether it is one of the copies that only schedules for comparison have: kCopyIn, kCopyOut, kReduceCopyIn.
bool is_copy(OpKind kind);

/// `work` is Program::work(operation); for a copy, one kernel with the bytes that it reads and writes; of no
/// matter for collectives. Throws UsageError for a collective on hardware whose link, or whose network, is
/// not known; InternalError when layout and schedule are for different numbers of shards.
OperationCost operation_cost(const Operation& operation, const Schedule& schedule, const Layout& layout,
                             std::span<const KernelWork> work, const Hardware& hardware, DType parameter_type,
                             const CollectiveSettings& settings = {});

/// Of all operations of a schedule, in its order; `work_of` is asked about all that are no collectives.
/// Throws what operation_cost() throws.
using WorkOf = std::function<std::vector<KernelWork>(const Operation&)>;
std::vector<OperationCost> operation_costs(const Schedule& schedule, const Layout& layout,
                                           const WorkOf& work_of, const Hardware& hardware,
                                           DType parameter_type, const CollectiveSettings& settings = {});
/// The same for what a program runs. Throws InternalError for copies, which programs know nothing of.
std::vector<OperationCost> operation_costs(const Schedule& schedule, const Layout& layout,
                                           const Program& program, const Hardware& hardware,
                                           DType parameter_type, const CollectiveSettings& settings = {});

}  // namespace minillm::shard
