#include <gtest/gtest.h>

#include "command.h"
#include "core/error.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

const std::string kReference = MINILLM_SOURCE_DIR "/configs/minillm.json";
const std::string kQuickstart = MINILLM_SOURCE_DIR "/configs/quickstart.json";

void expect_success(const Result& result, std::initializer_list<std::string> parts) {
  EXPECT_EQ(result.exit_code, static_cast<int>(ExitCode::kOk)) << result;
  EXPECT_EQ(result.err, "");
  for (const std::string& part : parts) EXPECT_GT(count(result.out, part), 0) << part << "\n" << result;
}

/// The exit code, nothing on stdout, and a message that comes first and has these parts.
void expect_failure(const Result& result, ExitCode code, std::initializer_list<std::string> parts) {
  expect_failed(result, code, parts);
  EXPECT_EQ(result.out, "");
  EXPECT_TRUE(result.err.starts_with("error: ") || result.err.starts_with("[rank 0] error: ")) << result;
}

TEST(CommandLine, HelpTellsCommandsAndExitCodes) {
  expect_success(minillm({"--help"}), {"train", "generate", "config", "Exit codes:", "\n  0 ", "\n  1 ",
                                       "\n  2 ", "\n  3 ", "\n  4 ", "\n  5 ", "\n  86 ", "\n  87 "});
  expect_success(minillm({"train", "--help"}), {"CONFIG", "--set KEY=VALUE", "--log-dir DIR"});
  expect_success(minillm({"generate", "--help"}),
                 {"MODEL", "--prompt TEXT", "--tokens N", "200", "--temperature X", "0.8", "--seed N"});
  expect_success(minillm({"config", "--help"}), {"CONFIG", "--describe", "--set KEY=VALUE"});
}

TEST(CommandLine, Version) {
  expect_success(minillm({"--version"}), {"minillm 0."});
}

TEST(CommandLine, UsageErrors) {
  expect_failure(minillm({}), ExitCode::kUsage, {"subcommand", "--help"});
  expect_failure(minillm({"trian", kReference}), ExitCode::kUsage, {"'trian'"});
  expect_failure(minillm({"train"}), ExitCode::kUsage, {"CONFIG"});
  expect_failure(minillm({"train", kReference, "--sett", "a=1"}), ExitCode::kUsage, {"--sett"});
  expect_failure(minillm({"train", kReference, "extra"}), ExitCode::kUsage, {"extra"});
  expect_failure(minillm({"train", kReference, "--set"}), ExitCode::kUsage, {"--set"});
  expect_failure(minillm({"config"}), ExitCode::kUsage, {"CONFIG", "--describe"});
  expect_failure(minillm({"config", "--describe", kReference}), ExitCode::kUsage, {"--describe"});
  expect_failure(minillm({"config", "--describe", "--set", "train.steps=1"}), ExitCode::kUsage, {"--set"});
  expect_failure(minillm({"generate"}), ExitCode::kUsage, {"MODEL"});
  expect_failure(minillm({"generate", "m", "--tokens", "many"}), ExitCode::kUsage, {"--tokens", "many"});
}

TEST(ConfigCommand, DescribesKeys) {
  expect_success(
      minillm({"config", "--describe"}),
      {"model.vocab_size (default 32000)", "train.optimizer.beta2 (default 0.999)", "checkpoint.dir"});
}

TEST(ConfigCommand, PrintsTheResolvedConfiguration) {
  const Result resolved =
      minillm({"config", kQuickstart, "--set", "train.steps=7", "--set", "train.seed=11"});
  expect_success(resolved, {"\"steps\": 7", "\"seed\": 11", "\"norm_eps\": 1.1920928955078125e-07"});
  const TemporaryFolder folder;
  EXPECT_EQ(minillm({"config", folder.write("again.json", resolved.out)}).out, resolved.out);
}

TEST(ConfigCommand, Errors) {
  const TemporaryFolder folder;
  expect_failure(minillm({"config", kReference, "--set", "train.stps=7"}), ExitCode::kUsage,
                 {"--set train.stps=7", "did you mean 'train.steps'"});
  expect_failure(minillm({"config", kReference, "--set", "train.steps"}), ExitCode::kUsage, {"KEY=VALUE"});
  expect_failure(minillm({"config", folder.write("type.json", R"({"train": {"steps": "x"}})")}),
                 ExitCode::kUsage, {"type.json", "'train.steps'", "\"x\""});
  expect_failure(minillm({"config", folder.write("syntax.json", "{\n  oops")}), ExitCode::kInput,
                 {"syntax.json", "line 2, column 3"});
  expect_failure(minillm({"config", folder.path("absent.json")}), ExitCode::kInput,
                 {"absent.json", "No such file"});
}

TEST(TrainCommand, ConfigurationErrorsNameTheRank) {
  expect_failure(minillm({"train", kReference, "--set", "model.n_heads=12"}), ExitCode::kUsage,
                 {"[rank 0] error: ", "model.n_heads (12)"});
  expect_failure(minillm({"train", "absent.json"}), ExitCode::kInput, {"[rank 0] error: absent.json"});
}

TEST(GenerateCommand, NeedsAWeightsFile) {
  expect_failure(minillm({"generate", "absent.safetensors"}), ExitCode::kInput,
                 {"absent.safetensors", "No such file"});
}

TEST(TrainCommand, AnErrorOfAllRanksIsToldOnceAndEndsAll) {
  if (!MINILLM_WITH_MPI) GTEST_SKIP() << "needs MPI";
  const Result result = minillm_on(3, {"train", kReference, "--set", "train.steps=0"});
  // Not first: mpirun has a message of its own about an aborted job, and prints them in any order.
  expect_failed(result, ExitCode::kUsage, {"[rank 0] error: ", "train.steps"});
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(count(result.err, "] error: "), 1) << result;
}

}  // namespace
}  // namespace minillm::test
