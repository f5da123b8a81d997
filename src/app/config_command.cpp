#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "app/cli.h"
#include "config/config.h"
#include "core/error.h"

namespace minillm::app {

void add_config_command(CLI::App& app) {
  struct Arguments {
    std::string config;
    std::vector<std::string> overrides;
    bool describe = false;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* const command = app.add_subcommand(
      "config", "Checks a configuration and prints it with all its keys, or tells what the keys are");
  CLI::Option* const file =
      command->add_option("CONFIG", arguments->config, "The configuration, a JSON file")->type_name("FILE");
  command
      ->add_option("--set", arguments->overrides, "Overrides a key of the configuration, e.g. train.steps=20")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false)
      ->needs(file);
  command->add_flag("--describe", arguments->describe, "Prints every key: default, meaning, allowed values")
      ->excludes(file);
  command->callback([arguments] {
    if (arguments->describe) {
      std::cout << config::describe();
    } else if (arguments->config.empty()) {
      throw UsageError("config: name a CONFIG file, or give --describe");
    } else {
      std::cout << config::to_json(config::load(arguments->config, arguments->overrides)) << "\n";
    }
  });
}

}  // namespace minillm::app
