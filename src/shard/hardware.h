// What a machine can do, as far as the simulated timeline needs it (shard/operation_cost.h).
//
// A description is a JSON file (docs/formats.md); those of configs/hardware are part of the program, and the
// report of `minillm bench --json` on a GPU is one, too. Every figure is a rate that programs reach, with its
// origin in words; what a data sheet promises is used for nothing but model flops utilization.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace minillm::shard {

/// Between the ranks of a node.
struct Link {
  double latency_s = 0;    ///< of a hop from one rank to the next
  double bytes_per_s = 0;  ///< bus bandwidth of a rank, as nccl-tests report it
  int64_t ranks = 1;       ///< of a node
};

/// Between nodes.
struct Network {
  double latency_s = 0;    ///< of a hop from one node to the next
  double bytes_per_s = 0;  ///< a rank's part of its node's bandwidth, in one direction
};

struct Hardware {
  std::string name;
  std::string source;                      ///< where each figure is from
  double gemm_flops_per_s = 0;             ///< of large matrix products in bf16
  std::optional<double> peak_flops_per_s;  ///< of the data sheet, in bf16, dense; for MFU
  double attention_flops_per_s = 0;        ///< forward and backward kernels together
  double memory_bytes_per_s = 0;           ///< of a large copy: bytes read and written
  double kernel_s = 0;                     ///< of a kernel that does next to nothing, in a row of them
  int64_t memory_bytes = 0;                ///< of the device
  int64_t multiprocessors = 0;             ///< 0: not known, and then collectives take none from kernels
  int64_t collective_ctas =
      0;  ///< thread blocks of a collective where NCCL chooses; each fills a multiprocessor
  std::optional<Link> link;
  std::optional<Network> network;
};

/// Names of configs/hardware in alphabetical order: "a100", "h100", …
std::vector<std::string> hardware_names();

/// Throws UsageError naming the nearest name and all of them.
Hardware hardware_by_name(std::string_view name);

/// Reads a description, or a report of `minillm bench` that has one. Throws InputError naming the file, the
/// key, the value and what is allowed: for a file that cannot be read, text that is not JSON, keys that are
/// missing or unknown, and figures that are out of range.
Hardware load_hardware(const std::string& path);

/// What parallel.hardware is: the path of a file where it has a full stop or a slash, else a name. Throws as
/// load_hardware() and hardware_by_name().
Hardware find_hardware(const std::string& name_or_path);

/// As load_hardware(), from text; `name` stands for the file in errors.
Hardware parse_hardware(std::string_view text, const std::string& name);

/// The JSON object that parse_hardware() reads.
std::string to_json(const Hardware& hardware);

}  // namespace minillm::shard
