#include <nlohmann/json.hpp>
#include <optional>

#include "cuda/gemm_cache.h"
#include "cuda/memory.h"
#include "cuda/timing.h"
#include "profile/report.h"
#include "shard/hardware.h"

namespace minillm::profile {
namespace {

using Json = nlohmann::ordered_json;

Json device_json(bool simulated) {
  const cuda::GemmDevice device = cuda::gemm_device();
  return {{"name", device.name},     {"multiprocessors", device.multiprocessors}, {"driver", device.driver},
          {"cublaslt", device.blas}, {"l2_bytes", cuda::l2_cache_bytes()},        {"simulated", simulated}};
}

Json case_json(const Case& c) {
  Json json = {{"name", c.name},
               {"calls_per_step", c.calls},
               {"minimal_bytes", c.cost.bytes},
               {"extra_bytes", c.cost.extra_bytes},
               {"minimal_flops", c.cost.flops}};
  if (c.product) json["product"] = cuda::describe(*c.product);
  return json;
}

void add_times(Json& json, const Case& c, double seconds, const Times& times, double step) {
  const double floor = times.roofline.floor_s(c.cost);
  json["median_s"] = seconds;
  json["floor_s"] = floor;
  json["bound"] = times.roofline.memory_bound(c.cost) ? "memory" : "compute";
  json["percent_of_floor"] = 100 * floor / seconds;
  json["minimal_bytes_per_s"] = static_cast<double>(c.cost.bytes) / seconds;
  json["minimal_flops_per_s"] = static_cast<double>(c.cost.flops) / seconds;
  json["percent_of_step"] = step > 0 ? 100 * seconds * static_cast<double>(c.calls) / step : 0.0;
}

/// Of all attention kernels that were measured; 0 when there are none.
double attention_flops_per_s(const Report& r) {
  double flops = 0, seconds = 0;
  for (size_t i = 0; i < r.cases.size(); ++i) {
    if (!r.cases[i].name.starts_with("attention_")) continue;
    flops += static_cast<double>(r.cases[i].cost.flops);
    seconds += r.times->seconds[i];
  }
  return seconds > 0 ? flops / seconds : 0;
}

/// What one GPU can tell of itself, as a description for simulations.
std::optional<shard::Hardware> measured_hardware(const Report& r) {
  const double attention = attention_flops_per_s(r);
  if (attention <= 0) return std::nullopt;
  const Roofline& roofline = r.times->roofline;
  return shard::Hardware{.name = cuda::gemm_device().name,
                         .source = "measured by minillm bench",
                         .gemm_flops_per_s = roofline.gemm_flops_per_s,
                         .peak_flops_per_s = std::nullopt,
                         .attention_flops_per_s = attention,
                         .memory_bytes_per_s = roofline.copy_bytes_per_s,
                         .kernel_s = roofline.kernel_s,
                         .memory_bytes = cuda::device_capacity().total,
                         .multiprocessors = cuda::gemm_device().multiprocessors,
                         .collective_ctas = 0,
                         .link = std::nullopt,
                         .network = std::nullopt};
}

}  // namespace

std::string to_json(const Report& r) {
  Json json = {{"format", 1},
               {"device", device_json(!r.times)},
               {"config", Json::parse(config::to_json(r.config))},
               {"ranks", r.ranks}};
  const double step = r.times ? r.times->step_s(r.cases) : 0;
  if (r.times) {
    json["repeats"] = r.times->repeats;
    json["copy_bandwidth_bytes_per_s"] = r.times->roofline.copy_bytes_per_s;
    json["gemm_rate_flops_per_s"] = r.times->roofline.gemm_flops_per_s;
    json["step_s"] = step;
    if (const auto hardware = measured_hardware(r)) json["hardware"] = Json::parse(shard::to_json(*hardware));
  }
  Json& cases = json["cases"] = Json::array();
  for (size_t i = 0; i < r.cases.size(); ++i) {
    cases.push_back(case_json(r.cases[i]));
    if (r.times) add_times(cases.back(), r.cases[i], r.times->seconds[i], *r.times, step);
  }
  return json.dump(2) + "\n";
}

}  // namespace minillm::profile
