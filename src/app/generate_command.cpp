#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>

#include "app/cli.h"
#include "train/generate.h"

namespace minillm::app {

void add_generate_command(CLI::App& app) {
  const auto options = std::make_shared<train::GenerateOptions>();
  CLI::App* const command = app.add_subcommand("generate", "Continues a text with a trained byte model");
  command->add_option("MODEL", options->model, "model.safetensors of a training run")
      ->type_name("FILE")
      ->required();
  command->add_option("--prompt", options->prompt, "The text to continue")->type_name("TEXT");
  command->add_option("--tokens", options->tokens, "How many bytes to add")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--temperature", options->temperature, "Randomness; 0: always the most likely byte")
      ->type_name("X")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Of the random choices")
      ->type_name("N")
      ->capture_default_str();
  command->callback([options] { train::generate(*options, std::cout); });
}

}  // namespace minillm::app
