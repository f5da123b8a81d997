// What comes from outside ends in exit codes 2, 3 and 4, with words: 1 is a defect.
#include <gtest/gtest.h>

#include "command.h"
#include "core/error.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

const std::string kQuickstart = MINILLM_SOURCE_DIR "/configs/quickstart.json";

std::vector<std::string> joined(std::vector<std::string> first, const std::vector<std::string>& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

Result with_variable(const std::string& assignment, const std::vector<std::string>& arguments) {
  return run(joined({"/usr/bin/env", assignment, MINILLM_PROGRAM}, arguments));
}

/// Weights of a byte model of `vocab_size`, trained for a step.
std::string weights(const TemporaryFolder& folder, const std::string& vocab_size,
                    const std::string& seq_len) {
  const Result result =
      minillm({"train", folder.write("tiny.json", R"({
    "model": {"dim": 8, "n_layers": 1, "n_heads": 1, "causal": true},
    "train": {"steps": 1, "micro_batch": 1}
  })"),
               "--set", "model.vocab_size=" + vocab_size, "--set", "train.seq_len=" + seq_len, "--set",
               "checkpoint.dir=" + folder.path("out")});
  EXPECT_EQ(result.exit_code, 0) << result;
  return folder.path("out/model.safetensors");
}

TEST(Input, NumbersOfOptionsAreDecimalAndInRange) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> options = {
      {{"generate", "m"}, "--tokens"},
      {{"generate", "m"}, "--seed"},
      {{"generate", "m"}, "--temperature"},
      {{"plan", kQuickstart}, "--world"},
      {{"plan", kQuickstart, "--world", "2"}, "--network"},
      {{"plan", kQuickstart, "--world", "2"}, "--ranks-per-node"},
      {{"plan", kQuickstart, "--world", "2"}, "--group"},
      {{"bench", kQuickstart}, "--repeats"},
      {{"bench", kQuickstart}, "--ranks"}};
  for (const auto& [command, option] : options) {
    expect_failed(minillm(joined(command, {option + "="})), ExitCode::kUsage, {option});
    for (const char* text :
         {" ", "0x10", "nan", "inf", "1e400", "99999999999999999999999999999999", "+5", "5x"})
      expect_failed(minillm(joined(command, {option + "=" + text})), ExitCode::kUsage, {option, text});
  }
  const auto plan = [](const char* world) {
    return minillm({"plan", kQuickstart, "--world", world, "--json"});
  };
  EXPECT_EQ(plan("0010").out, plan("10").out);  // not octal
}

TEST(Input, VariablesOfTheSimulatedDevice) {
  if (!MINILLM_SIMULATED) GTEST_SKIP() << "a GPU has none";
  const TemporaryFolder folder;
  const std::string model = weights(folder, "256", "16");
  for (const char* name : {"WORKERS", "ORDER", "STREAMS", "MEMORY", "DELAY", "NCCL_MEMORY"}) {
    const std::string variable = std::string("MINILLM_SIM_") + name;
    expect_failed(with_variable(variable + "=99999999999999999999", {"generate", model}), ExitCode::kUsage,
                  {variable, "allowed: "});
    expect_failed(with_variable(variable + "=", {"generate", model}), ExitCode::kUsage, {variable});
  }
}

TEST(Input, ConfigurationsThatAreNoFiles) {
  expect_failed(minillm({"config", "/dev/zero"}), ExitCode::kInput, {"/dev/zero", "more than"});
  expect_failed(minillm({"config", "/dev/null"}), ExitCode::kInput, {"/dev/null", "empty"});
  expect_failed(minillm({"plan", kQuickstart, "--world", "1", "--hardware", "/dev/zero"}), ExitCode::kInput,
                {"/dev/zero", "more than"});
  expect_failed(minillm({"generate", "/dev/zero"}), ExitCode::kInput, {"not a regular file"});
  // A pipe is as good as a file.
  EXPECT_EQ(run({"/bin/bash", "-c", MINILLM_PROGRAM " config <(sleep 0.1; echo '{}')"}).exit_code, 0);
}

TEST(Input, PromptsHaveTheModelsBytes) {
  const TemporaryFolder folder;
  const std::string model = weights(folder, "100", "16");
  expect_failed(minillm({"generate", model, "--prompt", "ab\xff"}), ExitCode::kUsage,
                {"byte 2 of the prompt", "value 255", "vocab_size is 100"});
  EXPECT_EQ(minillm({"generate", model, "--prompt", "ab", "--tokens", "2"}).exit_code, 0);
}

TEST(Input, AWindowThatDoesNotFitIsToldBeforeItIsAllocated) {
  if (!MINILLM_SIMULATED) GTEST_SKIP() << "needs a device whose memory can be chosen";
  const TemporaryFolder folder;
  const std::string model = weights(folder, "256", "512");
  expect_failed(with_variable("MINILLM_SIM_MEMORY=64K", {"generate", model}), ExitCode::kMemory,
                {"window of 512 tokens", "bytes", "train.seq_len"});
}

}  // namespace
}  // namespace minillm::test
