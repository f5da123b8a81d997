#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/cli.h"
#include "app/number_option.h"
#include "config/config.h"
#include "core/error.h"
#include "core/output_file.h"
#include "shard/hardware.h"
#include "shard/timeline.h"
#include "train/evaluation.h"
#include "train/plan_report.h"
#include "train/policy_search.h"

namespace minillm::app {
namespace {

struct Arguments {
  ConfigurationArguments configuration;
  int world = 1;
  int group = 0;
  std::string policy, gpu, hardware, trace;
  double network_gb_per_s = 0;
  int ranks_per_node = 0;
  bool json = false, schedule = false;
};

constexpr double kNetworkLatency = 1e-5;  // of hardware that comes without: what small messages take, about

// What the command line names, else what "auto" would take in a run, else a default.
shard::Hardware named_hardware(const Arguments& arguments, const std::string& of_config) {
  if (!arguments.hardware.empty()) return shard::load_hardware(arguments.hardware);
  if (!arguments.gpu.empty()) return shard::hardware_by_name(arguments.gpu);
  return shard::find_hardware(of_config.empty() ? "h100" : of_config);
}

shard::Hardware choose_hardware(const Arguments& arguments, const std::string& of_config) {
  shard::Hardware hardware = named_hardware(arguments, of_config);
  if (arguments.network_gb_per_s > 0) {
    if (!hardware.network) hardware.network = shard::Network{.latency_s = kNetworkLatency};
    hardware.network->bytes_per_s = arguments.network_gb_per_s * 1e9;
  }
  if (arguments.ranks_per_node > 0) {
    if (!hardware.link) hardware.link = shard::Link{};
    hardware.link->ranks = arguments.ranks_per_node;
  }
  return hardware;
}

// --policy and --group are what --set parallel.policy=… and parallel.group_size=… are, but for "fsdp2", which
// nobody can train with.
config::Config load_config(const Arguments& arguments) {
  ConfigurationArguments configuration = arguments.configuration;
  std::vector<std::string>& overrides = configuration.overrides;
  std::string policy = arguments.policy;
  if (policy.empty() && arguments.group > 0) policy = "hybrid";
  if (policy == "fsdp2") policy = arguments.group > 0 ? "hybrid" : "full";
  if (!policy.empty()) overrides.push_back("parallel.policy=" + policy);
  if (arguments.group > 0) overrides.push_back("parallel.group_size=" + std::to_string(arguments.group));
  return configuration.load();
}

void plan(const Arguments& arguments) {
  config::Config config = load_config(arguments);
  const shard::Hardware hardware = choose_hardware(arguments, config.parallel.hardware);
  const train::World world{arguments.world,
                           hardware.link ? static_cast<int>(hardware.link->ranks) : arguments.world};
  if (config.parallel.policy == "auto") {
    const int64_t bytes = config.memory.available(hardware.memory_bytes);
    const train::PolicySearch search = train::search_policy(config, world, hardware, bytes);
    if (search.best && !arguments.json) std::cout << search.table() << "\n";
    config = train::chosen_of(search, world, bytes);
  }
  const bool fsdp2 = arguments.policy == "fsdp2";
  const train::Evaluation own =
      fsdp2 ? train::evaluate_fsdp2(config, world, hardware) : train::evaluate(config, world, hardware);
  // The peer beside it shards as it does, or as it would do.
  std::optional<train::Evaluation> peer;
  if (!fsdp2) {
    config::Config peer_config = config;
    if (config.parallel.policy != "hybrid") peer_config.parallel.policy = "full";
    peer = train::evaluate_fsdp2(peer_config, world, hardware);
  }
  if (!arguments.trace.empty()) {
    OutputFile file(arguments.trace);
    file.write(shard::chrome_trace(own.plan.schedule, own.plan.waits, own.costs, own.timeline,
                                   own.plan.layout->unit_names()));
    file.finish();
  }
  if (arguments.json) {
    std::cout << train::plan_json(own, hardware, peer ? &*peer : nullptr) << "\n";
    return;
  }
  std::vector<const train::Evaluation*> columns{&own};
  if (peer) columns.push_back(&*peer);
  std::cout << train::plan_header(own, hardware) << "\n" << train::plan_table(columns, hardware) << "\n";
  if (arguments.schedule) std::cout << train::schedule_listing(own) << "\n";
  std::cout << shard::draw_lanes(own.plan.schedule, own.timeline, own.plan.layout->unit_names());
}

std::string footer() {
  std::string names;
  for (const std::string& name : shard::hardware_names()) names += " " + name;
  return "Hardware that is known by name:" + names +
         ".\nTimes are a model's: what large copies, products and collectives reach, shared by what runs at "
         "the same time.";
}

}  // namespace

void add_plan_command(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* const command = app.add_subcommand(
      "plan", "Shows memory, traffic and a simulated timeline of a training step, without a GPU");
  add_configuration(*command, arguments->configuration);
  add_number(*command, "--world", arguments->world, config::Integer{1, 1 << 20}, "Ranks of the job")
      ->required();
  command
      ->add_option(
          "--policy", arguments->policy,
          "parallel.policy: full, grads, replicate, hybrid, auto; or fsdp2, PyTorch's order with the "
          "same kernels")
      ->type_name("POLICY");
  add_number(*command, "--group", arguments->group, config::Integer{1, 1 << 20},
             "parallel.group_size: ranks that share a model; implies hybrid")
      ->type_name("K");
  CLI::Option* const gpu =
      command->add_option("--gpu", arguments->gpu, "Hardware by name, default: parallel.hardware, else h100")
          ->type_name("NAME");
  command
      ->add_option("--hardware", arguments->hardware,
                   "Hardware from a file, also one of minillm bench --json")
      ->type_name("FILE")
      ->excludes(gpu);
  add_number(*command, "--network", arguments->network_gb_per_s, config::Real{1e-6, 1e9},
             "Bandwidth of a rank to other nodes, GB/s in one direction")
      ->type_name("GB/s");
  add_number(*command, "--ranks-per-node", arguments->ranks_per_node, config::Integer{1, 1 << 16},
             "Ranks of a node, instead of the hardware's");
  CLI::Option* const schedule = command->add_flag("--schedule", arguments->schedule,
                                                  "Lists the operations with their times, slots and waits");
  command->add_option("--trace", arguments->trace, "Writes the timeline for chrome://tracing or Perfetto")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Prints numbers only, as JSON")->excludes(schedule);
  command->footer(footer());
  command->callback([arguments] { plan(*arguments); });
}

}  // namespace minillm::app
