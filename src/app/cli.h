// The command line: one function per subcommand adds its options and what it does. Options that a library
// checks (configuration keys, files, ranges) are checked there only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "config/config.h"

namespace CLI {  // NOLINT(readability-identifier-naming): the library's
class App;
class Option;
}  // namespace CLI

namespace minillm::app {

/// This process among the job's. A command that runs on several ranks makes the bootstrap before anything can
/// fail; until then the process is alone.
struct Process {
  int argc;
  char** argv;
  std::unique_ptr<comm::Bootstrap> bootstrap;
};

/// The program's name, version and device, as --version prints them.
inline constexpr const char* kProgram = "minillm " MINILLM_VERSION " (" MINILLM_DEVICE ")";

/// Parses the arguments and runs the command that they name. Throws UsageError for a command line that is not
/// allowed, and whatever the command throws.
void run_command_line(Process& process);

/// CONFIG and --set, which most commands have.
struct ConfigurationArguments {
  std::string file;
  std::vector<std::string> overrides;  ///< KEY=VALUE, the later ones win

  /// Throws what config::load() throws.
  config::Config load() const { return config::load(file, overrides); }
};
/// Adds them to a command; the option of the file, which is required unless the caller says otherwise.
CLI::Option* add_configuration(CLI::App& command, ConfigurationArguments& arguments);

void add_train_command(CLI::App& app, Process& process);
void add_plan_command(CLI::App& app);
void add_bench_command(CLI::App& app);
void add_generate_command(CLI::App& app);
void add_config_command(CLI::App& app);

}  // namespace minillm::app
