// What the simulated device has done, for tests. What is captured into a graph counts when the graph is
// launched, each time.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace sim {

struct CollectiveCount {
  int64_t calls = 0;
  int64_t bytes = 0;
};

/// What a communicator of NCCL was created with; fields that were not set are NCCL_CONFIG_UNDEF_INT.
struct CommunicatorConfig {
  int ranks = 0;
  int blocking = 0;
  int max_ctas = 0;
  int cta_policy = 0;
};

struct Counters {
  std::map<std::string, int64_t> launches = {};  ///< by kernel name, counted when launched
  std::map<std::string, CollectiveCount> collectives = {};
  int64_t collective_groups = 0;                                 ///< pairs of ncclGroupStart and ncclGroupEnd
  std::map<std::string, CommunicatorConfig> communicators = {};  ///< by name: the last one created
  std::map<std::string, int64_t> windows = {};  ///< registered with a communicator so far, by its name
  int64_t allocated_bytes = 0;                  ///< device memory now
  int64_t peak_bytes = 0;                       ///< and at most since the start or the last reset
  int64_t allocations = 0;                      ///< of device and pinned memory
  int64_t objects = 0;                          ///< streams, events and executable graphs created
  int64_t node_priority_graphs = 0;  ///< executable graphs whose nodes keep the priority of their stream
  int64_t host_waits = 0;  ///< for the device, a stream or an event, also those of blocking copies and frees
};

Counters counters();
/// Counts start at 0 again, the peak at what is allocated now.
void reset_counters();

/// For the stand-ins. Safe from any thread or operation; orders nothing.
void count_launch(const std::string& kernel);
void count_collective(const std::string& name, int64_t bytes);
void count_collective_group();
void record_communicator(const std::string& name, const CommunicatorConfig& config);
void count_window(const std::string& communicator);
void count_memory(int64_t bytes);  ///< negative when freed
void count_allocation();
void count_object();
void count_node_priority_graph();
void count_host_wait();

}  // namespace sim
