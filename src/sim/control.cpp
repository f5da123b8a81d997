#include "sim/control.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/number.h"
#include "sim/device.h"

namespace sim {
namespace {

[[noreturn]] void reject(const char* variable, std::string_view value, const char* allowed) {
  throw minillm::UsageError(std::string(variable) + " is '" + std::string(value) + "'; allowed: " + allowed);
}

std::optional<uint64_t> parse_seed(std::string_view text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return std::nullopt;
  return minillm::parse_number<uint64_t>(text.substr(prefix.size()));
}

Order parse_order(std::string_view text) {
  if (text == "forward") return {Order::Kind::kForward, 0};
  if (text == "stepwise") return {Order::Kind::kStepwise, 0};
  if (text == "reverse") return {Order::Kind::kReverse, 0};
  if (const auto seed = parse_seed(text, "shuffle:")) return {Order::Kind::kShuffle, *seed};
  reject("MINILLM_SIM_ORDER", text, "forward, stepwise, reverse, shuffle:SEED");
}

Streams parse_streams(std::string_view text) {
  if (text == "threads") return {};
  if (text == "clock") return {Streams::Kind::kClock, 0};
  if (const auto seed = parse_seed(text, "seed:")) return {Streams::Kind::kSeed, *seed};
  reject("MINILLM_SIM_STREAMS", text, "threads, seed:N, clock");
}

int64_t parse_bytes(const char* variable, std::string_view text, uint64_t least) {
  std::string_view digits = text;
  int shift = 0;
  for (const auto& [suffix, bits] : {std::pair{'K', 10}, {'M', 20}, {'G', 30}})
    if (text.ends_with(suffix)) shift = bits, digits.remove_suffix(1);
  const auto value = minillm::parse_number<uint64_t>(digits);
  if (!value || *value < least || *value > uint64_t{1} << (62 - shift))
    reject(variable, text,
           least > 0 ? "a positive number of bytes, with suffix K, M or G if you like"
                     : "a number of bytes, with suffix K, M or G if you like");
  return static_cast<int64_t>(*value << shift);
}

int64_t parse_memory(std::string_view text) {
  return parse_bytes("MINILLM_SIM_MEMORY", text, 1);
}

int64_t parse_nccl_buffers(std::string_view text) {
  return parse_bytes("MINILLM_SIM_NCCL_BUFFERS", text, 0);
}

NcclMemory parse_nccl_memory(std::string_view text) {
  if (text == "windows") return NcclMemory::kWindows;
  if (text == "local") return NcclMemory::kLocal;
  if (text == "no-windows") return NcclMemory::kNoWindows;
  if (text == "none") return NcclMemory::kNone;
  reject("MINILLM_SIM_NCCL_MEMORY", text, "windows, local, no-windows, none");
}

/// The numbers between dots, each below 100, as one: "2.30.7" is 23007. Nothing when there are not `count`.
std::optional<int> parse_version(std::string_view text, int count) {
  int version = 0;
  for (int i = 0; i < count; ++i) {
    const size_t dot = i + 1 < count ? text.find('.') : text.size();
    const auto number = minillm::parse_number<uint64_t>(text.substr(0, dot));
    if (dot == std::string_view::npos || !number || *number > 99) return std::nullopt;
    version = version * 100 + static_cast<int>(*number);
    text.remove_prefix(std::min(dot + 1, text.size()));
  }
  return version;
}

int parse_nccl_version(std::string_view text) {
  if (const auto version = parse_version(text, 3)) return *version;
  reject("MINILLM_SIM_NCCL_VERSION", text, "X.Y.Z, such as 2.30.7");
}

int parse_compute_capability(std::string_view text) {
  const auto version = parse_version(text, 2);
  if (version && *version % 100 < 10) return *version / 100 * 10 + *version % 100;
  reject("MINILLM_SIM_COMPUTE_CAPABILITY", text, "MAJOR.MINOR, such as 9.0");
}

int parse_workers(std::string_view text) {
  const auto value = minillm::parse_number<uint64_t>(text);
  if (!value || *value < 1 || *value > 256) reject("MINILLM_SIM_WORKERS", text, "1 to 256");
  return static_cast<int>(*value);
}

int default_workers() {
  const char* ranks = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  const auto local_ranks = ranks != nullptr ? minillm::parse_number<uint64_t>(ranks).value_or(1) : 1;
  const uint64_t share = std::thread::hardware_concurrency() / std::max<uint64_t>(local_ranks, 1);
  return static_cast<int>(std::clamp<uint64_t>(share, 1, 256));
}

/// The device is about to be used, the last moment at which CUDA's variables mean something.
void check_connections(const char* wanted) {
  const char* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (wanted != nullptr && (connections == nullptr || std::string_view(connections) != wanted))
    throw minillm::UsageError(
        std::string("MINILLM_SIM_CONNECTIONS is '") + wanted + "', but CUDA_DEVICE_MAX_CONNECTIONS is " +
        (connections ? std::string("'") + connections + "'" : "not set") + " when the device is first used");
}

Settings from_environment() {
  Settings settings;
  const auto variable = [](const char* name) { return std::getenv(name); };
  const char* workers = variable("MINILLM_SIM_WORKERS");
  settings.workers = workers != nullptr ? parse_workers(workers) : default_workers();
  if (const char* order = variable("MINILLM_SIM_ORDER")) settings.order = parse_order(order);
  if (const char* streams = variable("MINILLM_SIM_STREAMS")) settings.streams = parse_streams(streams);
  if (const char* memory = variable("MINILLM_SIM_MEMORY")) settings.memory_bytes = parse_memory(memory);
  if (const char* nccl = variable("MINILLM_SIM_NCCL_MEMORY")) settings.nccl_memory = parse_nccl_memory(nccl);
  if (const char* version = variable("MINILLM_SIM_NCCL_VERSION"))
    settings.nccl_version = parse_nccl_version(version);
  if (const char* capability = variable("MINILLM_SIM_COMPUTE_CAPABILITY"))
    settings.compute_capability = parse_compute_capability(capability);
  check_connections(variable("MINILLM_SIM_CONNECTIONS"));
  if (const char* bytes = variable("MINILLM_SIM_NCCL_BUFFERS"))
    settings.nccl_buffer_bytes = parse_nccl_buffers(bytes);
  if (const char* delay = variable("MINILLM_SIM_DELAY")) {
    settings.delay_seed = minillm::parse_number<uint64_t>(delay);
    if (!settings.delay_seed) reject("MINILLM_SIM_DELAY", delay, "a number");
  }
  return settings;
}

struct Guarded {
  std::mutex mutex;
  Settings settings = from_environment();
};
Guarded& guarded() {
  static auto* const guarded = new Guarded;  // outlives all threads
  return *guarded;
}

template <class Value>
void set(Value Settings::*member, Value value) {
  std::lock_guard lock(guarded().mutex);
  guarded().settings.*member = value;
}

}  // namespace

Settings settings() {
  std::lock_guard lock(guarded().mutex);
  return guarded().settings;
}

void set_workers(int workers) {
  set(&Settings::workers, parse_workers(std::to_string(workers)));
}
void set_order(std::string_view order) {
  set(&Settings::order, parse_order(order));
}
void set_order(Order order) {
  set(&Settings::order, order);
}
void set_memory(int64_t bytes) {
  set(&Settings::memory_bytes, parse_memory(std::to_string(bytes)));
}
void set_delay(std::optional<uint64_t> seed) {
  set(&Settings::delay_seed, seed);
}

void set_nccl_memory(std::string_view support) {
  set(&Settings::nccl_memory, parse_nccl_memory(support));
}

void set_nccl_version(std::string_view version) {
  set(&Settings::nccl_version, parse_nccl_version(version));
}

void set_nccl_buffers(int64_t bytes) {
  set(&Settings::nccl_buffer_bytes, parse_nccl_buffers(std::to_string(bytes)));
}

void set_streams(std::string_view mode) {
  const Streams before = settings().streams;
  set(&Settings::streams, parse_streams(mode));
  try {
    device().scheduler.reload_mode();
  } catch (const std::logic_error&) {
    set(&Settings::streams, before);
    throw;
  }
}

}  // namespace sim
