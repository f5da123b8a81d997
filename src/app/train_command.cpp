#include <CLI/CLI.hpp>
#include <memory>

#include "app/cli.h"
#include "config/config.h"
#include "train/run.h"

namespace minillm::app {

void add_train_command(CLI::App& app, Process& process) {
  struct Arguments {
    ConfigurationArguments configuration;
    train::RunOptions options;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* const command = app.add_subcommand("train", "Trains a model on all ranks of the job");
  add_configuration(*command, arguments->configuration);
  command->add_option("--log-dir", arguments->options.log_dir, "Appends to metrics.jsonl in this folder")
      ->type_name("DIR");
  command->footer("`minillm config --describe` tells all keys.");
  command->callback([arguments, &process] {
    process.bootstrap = comm::make_bootstrap(&process.argc, &process.argv);
    arguments->options.program = kProgram;
    const config::Config config = arguments->configuration.load();
    train::run(config, *process.bootstrap, arguments->options);
  });
}

}  // namespace minillm::app
