// What ends a run that makes no progress, and what does not: each phase has its own limit, and a reader that
// does not read is no cause.
#include <gtest/gtest.h>

#include "command.h"
#include "core/error.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

using Words = std::vector<std::string>;

Words joined(std::initializer_list<Words> parts) {
  Words all;
  for (const Words& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Words mpirun(int ranks) {
  return {MINILLM_SOURCE_DIR "/scripts/mpirun.sh", "-np", std::to_string(ranks)};
}

class TimeLimits : public ::testing::Test {
 protected:
  Words train(const Words& more) const {
    Words command{MINILLM_PROGRAM, "train", config_};
    for (const std::string& each : more) {
      if (!each.starts_with("--")) command.emplace_back("--set");
      command.push_back(each);
    }
    return command;
  }
  std::string saving() const { return "checkpoint.dir=" + folder_.path("out"); }

  const TemporaryFolder folder_;

 private:
  const std::string config_ = folder_.write("tiny.json", R"({
    "model": {"vocab_size": 64, "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 16},
    "train": {"steps": 3, "micro_batch": 1, "seq_len": 8}
  })");
};

TEST_F(TimeLimits, AWindowThatOneRankIsRefusedEndsTheJobWithTheCause) {
  if (!MINILLM_WITH_MPI || !MINILLM_SIMULATED) GTEST_SKIP() << "needs MPI and the simulated device";
  const Words good = train({"parallel.startup_timeout_s=3"});
  const Words refused = joined({{"/usr/bin/env", "MINILLM_SIM_NCCL_MEMORY=no-windows"}, good});
  for (const Words& rest : {Words{}, joined({{":", "-np", "1"}, good})}) {
    const Words command = joined({mpirun(1), good, {":", "-np", "1"}, refused, rest});
    // The other ranks wait in ncclCommWindowRegister, and this one in MPI.
    expect_failed(run(command), ExitCode::kCommunication,
                  {"[rank 1] watchdog: no progress for 1.5 s in the agreement of all ranks after "
                   "ncclCommWindowRegister failed on this one",
                   "MINILLM_SIM_NCCL_MEMORY is no-windows"});
  }
}

/// The program with a slow disk.
Words with_slow_fsync(int seconds) {
  return {"/usr/bin/env", "LD_PRELOAD=" MINILLM_SLOW_FSYNC, "SLOW_FSYNC_S=" + std::to_string(seconds)};
}

TEST_F(TimeLimits, ASlowDiskDoesNotEndARunThatIsBeingSaved) {
  const Words command = joined({with_slow_fsync(3), train({"parallel.timeout_s=1", saving()})});
  const Result result = run(MINILLM_WITH_MPI ? joined({mpirun(2), command}) : command);
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(count(result.out, "saved " + folder_.path("out/model.safetensors")), 1) << result;
}

TEST_F(TimeLimits, ADiskThatDoesNotAnswerEndsTheRunAndIsNamed) {
  const Result result = run(joined({with_slow_fsync(600), train({"checkpoint.timeout_s=1", saving()})}),
                            std::chrono::seconds(60));
  expect_failed(
      result, ExitCode::kCommunication,
      {"[rank 0] watchdog: no progress for 1 s in saving " + folder_.path("out/model.safetensors") +
       ": the device or a file system does not answer, or this takes longer than checkpoint.timeout_s; "
       "ending the run"});
  EXPECT_EQ(count(result.err, "another rank"), 0) << result;
}

/// `command`, whose standard output goes to the shell command `reader`.
Words piped(const Words& command, const std::string& reader) {
  return joined({{"/bin/bash", "-c", "set -o pipefail; { \"$@\"; } | { " + reader + "; }", "bash"}, command});
}

TEST_F(TimeLimits, AReaderThatDoesNotReadHoldsUpNothing) {
  // The pipe is full before the run starts, and is read two time limits after all steps were made.
  const std::string log = folder_.path("log") + "/metrics.jsonl";
  const Words command = joined(
      {{"/bin/bash", "-c", "timeout 0.5 cat /dev/zero; exec \"$@\"", "bash"},
       train({"parallel.timeout_s=1", "parallel.startup_timeout_s=1", "--log-dir=" + folder_.path("log")})});
  const std::string reader = "for ((i = 0; i < 600; ++i)); do [[ $(cat '" + log +
                             "' 2>/dev/null | wc -l) == 3 ]] && break; sleep 0.1; done; sleep 2; exec cat";
  const Result result = run(piped(command, reader));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(count(result.out, "\nStep "), 3);
}

TEST_F(TimeLimits, OutputThatCannotBeWrittenIsAnErrorOfItsOwn) {
  expect_failed(run(piped(train({"train.steps=100000"}), "read -r line")), ExitCode::kInput,
                {"standard output cannot be written: Broken pipe"});
  const Words full{"/bin/bash", "-c", "exec \"$@\" >/dev/full", "bash"};
  expect_failed(run(joined({full, train({"train.steps=1"})})), ExitCode::kInput,
                {"standard output cannot be written: No space left on device"});
  if (!MINILLM_WITH_MPI) return;
  expect_failed(run(joined({mpirun(2), full, train({"train.steps=100000"})})), ExitCode::kInput,
                {"[rank 0] error: standard output cannot be written: No space left on device"});
}

}  // namespace
}  // namespace minillm::test
