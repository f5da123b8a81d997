#include "app/cli.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "core/error.h"

namespace minillm::app {
namespace {

std::string exit_codes() {
  struct Meaning {
    ExitCode code;
    const char* text;
  };
  constexpr Meaning kMeanings[] = {
      {ExitCode::kOk, "success"},
      {ExitCode::kInternal, "a defect in minillm itself"},
      {ExitCode::kUsage, "command line or configuration: fix it"},
      {ExitCode::kInput, "a file or data: missing, unreadable, malformed, unwritable"},
      {ExitCode::kMemory, "the planned memory does not fit the device, or the host has none left"},
      {ExitCode::kDevice, "CUDA, cuBLASLt or a kernel failed"},
      {ExitCode::kCommunication,
       "NCCL or MPI failed, ranks disagreed, or a time limit ended the job: try again"},
      {ExitCode::kNumerics, "training produced no finite values: trying again does not help"},
  };
  std::string text = "Exit codes:\n";
  for (const auto& [code, meaning] : kMeanings) {
    std::string number = std::to_string(static_cast<int>(code));
    number.resize(4, ' ');
    text += "  " + number + meaning + "\n";
  }
  return text + "\n`minillm COMMAND --help` tells the options of a command.";
}

}  // namespace

CLI::Option* add_configuration(CLI::App& command, ConfigurationArguments& arguments) {
  CLI::Option* const file = command.add_option("CONFIG", arguments.file, "The configuration, a JSON file")
                                ->type_name("FILE")
                                ->required();
  command
      .add_option("--set", arguments.overrides, "Overrides a key of the configuration, e.g. train.steps=20")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  return file;
}

void run_command_line(Process& process) {
  CLI::App app("MiniLLM: trains transformers on many GPUs. Start several ranks with mpirun or srun.",
               "minillm");
  app.set_version_flag("--version", kProgram);
  app.require_subcommand(1);
  app.footer(exit_codes());
  add_train_command(app, process);
  add_plan_command(app);
  add_bench_command(app);
  add_generate_command(app);
  add_config_command(app);
  try {
    app.parse(process.argc, process.argv);
  } catch (const CLI::Success& request) {  // --help, --version
    app.exit(request);
  } catch (const CLI::ParseError& error) {
    // A misspelt command is reported as a missing one.
    const std::vector<std::string> unknown = app.remaining();
    const std::string what = unknown.empty() ? error.what() : "unknown argument '" + unknown.front() + "'";
    // Other ranks may have arguments that are allowed, and wait for this one.
    if (app.got_subcommand("train")) process.bootstrap = comm::make_bootstrap(&process.argc, &process.argv);
    throw UsageError(what + "; see minillm --help and minillm COMMAND --help");
  }
}

}  // namespace minillm::app
