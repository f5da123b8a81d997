#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "app/cli.h"
#include "app/number_option.h"
#include "config/config.h"
#include "core/error.h"
#include "core/output_file.h"
#include "profile/meter.h"
#include "profile/report.h"
#include "train/step_plan.h"

namespace minillm::app {
namespace {

struct Arguments {
  ConfigurationArguments configuration;
  std::string only, json;
  int ranks = 1;
  profile::MeterOptions meter;
};

profile::Times measure(const profile::Report& report, profile::MeterOptions options) {
  options.sm_limit = report.config.gemm.sm_limit;
  options.fastest_products = !report.config.gemm.deterministic;
  profile::Times times{.repeats = options.repeats};
  profile::Meter meter(options);
  times.roofline = profile::measure_roofline(report.config.precision.param, options.repeats);
  for (const profile::Case& c : report.cases) times.seconds.push_back(meter.seconds(c));
  return times;
}

void bench(const Arguments& arguments) {
  profile::Report report;
  report.config = arguments.configuration.load();
  report.ranks = arguments.ranks;
  const train::StepPlan plan = train::make_step_plan(report.config, {arguments.ranks, arguments.ranks});
  report.config = plan.config;
  report.cases = profile::matching(profile::step_cases(plan.config, *plan.layout), arguments.only);
  std::optional<OutputFile> file;
  if (!arguments.json.empty()) file.emplace(arguments.json);
  if (!MINILLM_SIMULATED) report.times = measure(report, arguments.meter);
  profile::print_table(report, std::cout);
  if (!file) return;
  file->write(profile::to_json(report));
  file->finish();
}

}  // namespace

void add_bench_command(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* const command = app.add_subcommand(
      "bench", "Measures each kernel and matrix product of a training step against the device's limits");
  add_configuration(*command, arguments->configuration);
  command
      ->add_option("--only", arguments->only,
                   "Only cases whose names contain a match, e.g. '^gemm|attention'")
      ->type_name("REGEX");
  command->add_option("--json", arguments->json, "Writes the results into this file, too")->type_name("FILE");
  add_number(*command, "--repeats", arguments->meter.repeats, config::Integer{1, 1000},
             "Timed calls of each, of which the median counts")
      ->default_str(std::to_string(arguments->meter.repeats));
  add_number(*command, "--ranks", arguments->ranks, config::Integer{1, 1 << 20},
             "How many ranks share the optimizer's work; one is measured, on this machine's first GPU")
      ->default_str("1");
  command->footer(
      "The floor of a case is the time that its minimal bytes take at the speed of a large copy, or its\n"
      "floating-point operations at the speed of a large matrix product, whichever is longer; both speeds "
      "are\n"
      "measured first. On the simulated device bytes and operations are counted and nothing is measured.");
  command->callback([arguments] { bench(*arguments); });
}

}  // namespace minillm::app
