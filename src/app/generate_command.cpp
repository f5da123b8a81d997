#include <CLI/CLI.hpp>
#include <iostream>
#include <limits>
#include <memory>

#include "app/cli.h"
#include "app/number_option.h"
#include "train/generate.h"

namespace minillm::app {

void add_generate_command(CLI::App& app) {
  const auto options = std::make_shared<train::GenerateOptions>();
  CLI::App* const command = app.add_subcommand("generate", "Continues a text with a trained byte model");
  command->add_option("MODEL", options->model, "model.safetensors of a training run")
      ->type_name("FILE")
      ->required();
  command->add_option("--prompt", options->prompt, "The text to continue")->type_name("TEXT");
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  add_number(*command, "--tokens", options->tokens, config::Integer{1, kMost}, "How many bytes to add")
      ->default_str("200");
  add_number(*command, "--temperature", options->temperature, config::Real{0, config::kHuge},
             "Randomness; 0: always the most likely byte")
      ->type_name("X")
      ->default_str("0.8");
  add_number(*command, "--seed", options->seed, config::Integer{0, kMost}, "Of the random choices")
      ->default_str("0");
  command->callback([options] { train::generate(*options, std::cout); });
}

}  // namespace minillm::app
