#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>

#include "app/cli.h"
#include "config/config.h"
#include "core/error.h"

namespace minillm::app {

void add_config_command(CLI::App& app) {
  struct Arguments {
    ConfigurationArguments configuration;
    bool describe = false;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* const command = app.add_subcommand(
      "config", "Checks a configuration and prints it with all its keys, or tells what the keys are");
  CLI::Option* const file = add_configuration(*command, arguments->configuration)->required(false);
  command->get_option("--set")->needs(file);
  command->add_flag("--describe", arguments->describe, "Prints every key: default, meaning, allowed values")
      ->excludes(file);
  command->callback([arguments] {
    if (arguments->describe) {
      std::cout << config::describe();
    } else if (arguments->configuration.file.empty()) {
      throw UsageError("config: name a CONFIG file, or give --describe");
    } else {
      std::cout << config::to_json(arguments->configuration.load()) << "\n";
    }
  });
}

}  // namespace minillm::app
