// A process that no launcher started, in environments that have nothing.
#include <gtest/gtest.h>

#include <cstdlib>

#include "command.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

Result run_with(std::vector<std::string> environment, const std::vector<std::string>& arguments) {
  std::vector<std::string> command{"/usr/bin/env", "-i"};
  if (const char* libraries = std::getenv("LD_LIBRARY_PATH"))
    command.push_back(std::string("LD_LIBRARY_PATH=") + libraries);
  command.insert(command.end(), environment.begin(), environment.end());
  command.push_back(MINILLM_PROGRAM);
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run(command);
}

TEST(Alone, EveryCommandRunsWithoutAnEnvironment) {
  const TemporaryFolder folder;
  const std::string config = folder.write("tiny.json", R"({
    "model": {"vocab_size": 256, "dim": 32, "n_layers": 1, "n_heads": 2, "ffn_dim": 64, "causal": true},
    "train": {"steps": 1, "micro_batch": 1, "seq_len": 16}
  })");
  const std::vector<std::vector<std::string>> commands{
      {"train", config, "--set", "checkpoint.dir=" + folder.path("out")},
      {"generate", folder.path("out/model.safetensors"), "--tokens", "2"},
      {"plan", config, "--world", "2"},
      {"bench", config},
      {"config", config},
      {"--version"}};
  for (const std::vector<std::string>& environment :
       {std::vector<std::string>{}, {"TMPDIR=/nonexistent", "PATH=", "HOME=/nonexistent"}})
    for (const std::vector<std::string>& command : commands) {
      const Result result = run_with(environment, command);
      EXPECT_EQ(result.exit_code, 0) << command.front() << "\n" << result;
      EXPECT_EQ(result.err, "") << command.front();
    }
}

TEST(Alone, ButAnnouncedAsOneOfSeveralItDoesNotTrain) {
  const Result result = run_with({"SLURM_NTASKS=4", "SLURM_PROCID=0"}, {"train", "any.json"});
  expect_failed(result, ExitCode::kCommunication,
                {"(SLURM_NTASKS=4)", "sees only itself", "unset SLURM_NTASKS"});
}

}  // namespace
}  // namespace minillm::test
