#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "app/cli.h"
#include "config/config.h"
#include "train/run.h"

namespace minillm::app {

void add_train_command(CLI::App& app, Process& process) {
  struct Arguments {
    std::string config;
    std::vector<std::string> overrides;
    train::RunOptions options;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* const command = app.add_subcommand("train", "Trains a model on all ranks of the job");
  command->add_option("CONFIG", arguments->config, "The configuration, a JSON file")
      ->type_name("FILE")
      ->required();
  command
      ->add_option("--set", arguments->overrides, "Overrides a key of the configuration, e.g. train.steps=20")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  command->add_option("--log-dir", arguments->options.log_dir, "Writes metrics.jsonl into this folder")
      ->type_name("DIR");
  command->footer("`minillm config --describe` tells all keys.");
  command->callback([arguments, &process] {
    process.bootstrap = comm::make_bootstrap(&process.argc, &process.argv);
    const config::Config config = config::load(arguments->config, arguments->overrides);
    train::run(config, *process.bootstrap, arguments->options);
  });
}

}  // namespace minillm::app
