#include "train/phases.h"

namespace minillm::train {

comm::Phase start_up(const config::Config& config, const std::string& part) {
  return {.name = "start-up (" + part + ")",
          .limit_s = config.parallel.startup_timeout_s,
          .limit = "parallel.startup_timeout_s"};
}

comm::Phase start_up_with_step(const config::Config& config, const std::string& part) {
  return {.name = "start-up (" + part + ")",
          .limit_s = config.parallel.startup_timeout_s + config.parallel.timeout_s,
          .limit = "parallel.startup_timeout_s and parallel.timeout_s together"};
}

comm::Phase step(const config::Config& config, int64_t number) {
  if (number == 0) return start_up_with_step(config, "step 0");
  return {.name = "step " + std::to_string(number),
          .limit_s = config.parallel.timeout_s,
          .limit = "parallel.timeout_s"};
}

comm::Phase reporting(const config::Config& config, int64_t number) {
  return {.name = "the report of step " + std::to_string(number),
          .limit_s = config.parallel.timeout_s,
          .limit = "parallel.timeout_s"};
}

comm::Phase saving(const config::Config& config, const std::string& path, int rank) {
  return {.name = rank == 0 ? "saving " + path : "waiting for rank 0 to save " + path,
          .limit_s = config.checkpoint.timeout_s,
          .limit = "checkpoint.timeout_s"};
}

comm::Phase ending(const config::Config& config) {
  return {.name = "the end (giving communicators back)",
          .limit_s = config.parallel.timeout_s,
          .limit = "parallel.timeout_s"};
}

}  // namespace minillm::train
