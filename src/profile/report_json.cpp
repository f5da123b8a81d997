#include <nlohmann/json.hpp>

#include "cuda/gemm_cache.h"
#include "cuda/timing.h"
#include "profile/report.h"

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
  }
  Json& cases = json["cases"] = Json::array();
  for (size_t i = 0; i < r.cases.size(); ++i) {
    cases.push_back(case_json(r.cases[i]));
    if (r.times) add_times(cases.back(), r.cases[i], r.times->seconds[i], *r.times, step);
  }
  return json.dump(2) + "\n";
}

}  // namespace minillm::profile
