// What the program writes, as its users meet it: files that appear whole or stay as they were, and an error
// where something cannot be written.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <sstream>

#include "command.h"
#include "core/error.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOld = "the weights of an earlier run";

class Output : public ::testing::Test {
 protected:
  /// Runs a script that may name $minillm, $train (a run of one step), $config and $folder.
  Result bash(const std::string& script) const {
    return run({"/usr/bin/env", "minillm=" MINILLM_PROGRAM, "config=" + config_,
                "train=" MINILLM_PROGRAM " train " + config_ + " --set train.steps=1",
                "folder=" + fs::path(config_).parent_path().string(), "failing=" MINILLM_FAILING_CALLS,
                "slow=" MINILLM_SLOW_FSYNC, "/bin/bash", "-o", "pipefail", "-c", script});
  }
  std::string weights() const { return folder_.path("out/model.safetensors"); }
  void write_old_weights() const {
    fs::create_directory(folder_.path("out"));
    folder_.write("out/model.safetensors", kOld);
  }
  /// Nothing else is in the folder.
  void expect_old_weights(const std::string& scene) const {
    EXPECT_EQ(folder_.read("out/model.safetensors"), kOld) << scene;
    EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path("out")), {}), 1) << scene;
  }
  /// The lines of metrics.jsonl, which all are whole records.
  std::vector<std::string> metrics() const {
    std::istringstream text(folder_.read("log/metrics.jsonl"));
    std::vector<std::string> records;
    for (std::string line; std::getline(text, line);) {
      EXPECT_TRUE(line.starts_with("{\"step\":") && line.ends_with("\"}")) << line;
      records.push_back(line);
    }
    return records;
  }
  static std::string run_of(const std::string& record) { return record.substr(record.find("\"run\":")); }

  const TemporaryFolder folder_;
  const std::string config_ = folder_.write("tiny.json", R"({
    "model": {"vocab_size": 64, "dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 16},
    "train": {"steps": 3, "micro_batch": 1, "seq_len": 8}
  })");
};

constexpr const char* kSave = R"( --set checkpoint.dir="$folder/out")";

TEST_F(Output, StandardOutputThatCannotBeWrittenIsAnError) {
  struct Case {
    std::string redirection, cause;
  };
  const Case cases[] = {{"> /dev/full", "No space left on device"},
                        {">&-", "Bad file descriptor"},
                        {"| exec 0<&-", "Broken pipe"}};
  for (const std::string command : {"config $config", "config --describe", "--help",
                                    "plan $config --world 2 --schedule", "bench $config"})
    for (const auto& [redirection, cause] : cases) {
      // A pipe whose reader has gone before the program starts.
      const std::string script = redirection[0] == '|'
                                     ? "exec 3> >(exec true); wait $!; $minillm " + command + " >&3"
                                     : "$minillm " + command + redirection;
      const Result result = bash(script);
      expect_failed(result, ExitCode::kInput, {"error: standard output cannot be written: " + cause});
    }
  // The command's own error goes first.
  expect_failed(bash("$minillm config absent.json > /dev/full"), ExitCode::kInput, {"absent.json"});
}

TEST_F(Output, AClosedStandardOutputDoesNotEndUpInAFile) {
  const Result result = bash(std::string("$train --log-dir $folder/log >&-") + kSave);
  expect_failed(result, ExitCode::kInput, {"standard output cannot be written: Bad file descriptor"});
  metrics();
}

TEST_F(Output, DevicesPipesAndLinksStay) {
  // Where the program could remove the machine's own, one of the test's.
  std::string device = "/dev/null";
  if (geteuid() == 0) {
    device = folder_.path("null");
    if (mknod(device.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0) device.clear();
  }
  if (!device.empty()) {
    EXPECT_EQ(bash("$minillm plan $config --world 2 --trace " + device).exit_code, 0);
    EXPECT_EQ(bash("$minillm bench $config --json " + device).exit_code, 0);
    EXPECT_TRUE(fs::is_character_file(device));
  }
  folder_.write("trace.json", "older");
  fs::create_symlink("trace.json", folder_.path("link"));
  const Result result = bash(R"(mkfifo $folder/fifo; cat $folder/fifo > $folder/copy & reader=$!
    $minillm plan $config --world 2 --trace $folder/fifo && wait $reader && test -p $folder/fifo &&
    $minillm plan $config --world 2 --trace $folder/link && test -L $folder/link &&
    $minillm plan $config --world 2 --trace /dev/stdout | grep traceEvents > $folder/found)");
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(count(folder_.read("copy"), "traceEvents"), 1);
  EXPECT_EQ(folder_.read("trace.json"), folder_.read("copy"));
}

TEST_F(Output, WhatStopsSavingIsKnownBeforeTheFirstStep) {
  const auto refused = [&](const std::string& script, std::initializer_list<std::string> parts) {
    const Result result = bash(script);
    expect_failed(result, ExitCode::kInput, parts);
    EXPECT_EQ(count(result.out, "Step 0"), 0) << result;
  };
  write_old_weights();
  // Large enough for what MPI writes at its start.
  const std::string limit = "ulimit -f 16384; ";
  refused(limit + "$train --set model.vocab_size=300000" + kSave,
          {"out/model.safetensors: cannot be written: ", "a file may have 16777216", "ulimit -f"});
  refused("mkdir $folder/log; truncate -s 17M $folder/log/metrics.jsonl; " + limit +
              "$train --log-dir $folder/log",
          {"metrics.jsonl: cannot be written: ", "ulimit -f"});
  expect_old_weights("limit of file sizes");
  fs::create_directories(folder_.path("taken/model.safetensors"));
  refused("$train --set checkpoint.dir=$folder/taken",
          {"taken/model.safetensors: cannot be written: ", "directory"});
  fs::create_directories(folder_.path("taken/metrics.jsonl"));
  refused("$train --log-dir $folder/taken", {"taken/metrics.jsonl: cannot be written: ", "directory"});
  // Disks of the test's own, which need rights that not everybody has.
  const std::string mounts = "unshare --mount bash -c 'mount -t tmpfs -o size=16k tmpfs $folder/out";
  if (bash(mounts + "'").exit_code != 0) GTEST_SKIP() << "no rights to mount";
  const std::string small = mounts + " && echo -n old > $folder/out/model.safetensors; $train";
  refused(small + kSave + "; rc=$?; ls -A $folder/out >&2; exit $rc'",
          {"out/model.safetensors: cannot be written: it takes ", "are free on its disk",
           "\nmodel.safetensors\n"});
  refused(mounts + " && mount -o remount,ro tmpfs $folder/out; $train" + kSave + "'",
          {"cannot be written: Read-only file system"});
  refused(mounts + " && mount -o remount,ro tmpfs $folder/out; $train --log-dir $folder/out'",
          {"cannot be written: Read-only file system"});
}

TEST_F(Output, AFaultWhileSavingLeavesTheOldWeights) {
  write_old_weights();
  struct Case {
    std::string call;
    int error;
  };
  for (const auto& [call, error] : {Case{"write", ENOSPC}, Case{"write", EDQUOT}, Case{"write", EIO},
                                    Case{"fsync", EIO}, Case{"close", EDQUOT}, Case{"rename", EPERM}}) {
    const Result result = bash("LD_PRELOAD=$failing FAIL_PATH=model.safetensors.tmp- FAIL_CALL=" + call +
                               " FAIL_ERRNO=" + std::to_string(error) + " $train" + kSave);
    expect_failed(result, ExitCode::kInput, {weights() + ": cannot be written: " + std::strerror(error)});
    EXPECT_EQ(count(result.out, "saved"), 0) << result;
    expect_old_weights(call);
  }
  const Result result = bash(std::string("$train") + kSave +
                             " && mv $folder/out/model.safetensors $folder && "
                             "LD_PRELOAD=$failing FAIL_PATH=model.safetensors.tmp- FAIL_CALL=short $train" +
                             kSave + " && cmp $folder/out/model.safetensors $folder/model.safetensors");
  EXPECT_EQ(result.exit_code, 0) << result;
}

TEST_F(Output, ASecondRunInAFolderIsRefusedAndLearnsOfTheFirst) {
  const Result result = bash(R"(
    trap 'kill -KILL $(jobs -p) 2> $folder/none' EXIT
    first() { $minillm train $config --set train.steps=1000000 "$@" > $folder/first & }
    await() { for ((i = 0; i < 600; ++i)); do test -s $folder/$1 && return; sleep 0.1; done; exit 99; }
    first --set checkpoint.dir=$folder/out; await out/.model.safetensors.lock
    $train --set checkpoint.dir=$folder/out; test $? = 3 || exit 98
    kill -KILL $!; wait $!
    first --log-dir $folder/log; await log/.metrics.jsonl.lock
    $train --log-dir $folder/log; test $? = 3 || exit 97
    kill -KILL $!; wait $!
    $train --set checkpoint.dir=$folder/out --log-dir $folder/out)");
  EXPECT_EQ(result.exit_code, 0) << result;  // of a run after those that were killed
  EXPECT_EQ(count(result.out, "Step 0"), 1) << result;
  for (const char* name : {"model.safetensors", "metrics.jsonl"})
    EXPECT_EQ(count(result.err, std::string(name) + ": another run is writing it: process "), 1) << result;
}

TEST_F(Output, AFileSystemWithoutLocksIsSaid) {
  const Result result = bash(std::string("LD_PRELOAD=$failing FAIL_PATH=.lock FAIL_CALL=flock FAIL_ERRNO=") +
                             std::to_string(ENOSYS) + " $train" + kSave);
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(count(result.out, "has no locks"), 1) << result;
}

TEST_F(Output, ARunThatIsKilledWhileItSavesLeavesTheOldWeights) {
  write_old_weights();
  const Result result = bash(R"sh(
    LD_PRELOAD=$slow SLOW_FSYNC_S=100 $train --set checkpoint.dir=$folder/out &
    temporary() { find $folder/out -name 'model.safetensors.tmp-*' -size +1k; }
    for ((i = 0; i < 600; ++i)); do test -n "$(temporary)" && break; sleep 0.1; done
    kill -KILL $!; wait $!; test -n "$(temporary)")sh");
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(folder_.read("out/model.safetensors"), kOld);
  EXPECT_EQ(bash(std::string("$train") + kSave).exit_code, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path("out")), {}), 1) << "what the killed run left";
}

TEST_F(Output, MetricsOfEarlierRunsStay) {
  ASSERT_EQ(bash("$train --log-dir $folder/log").exit_code, 0);
  const std::string first = folder_.read("log/metrics.jsonl");
  expect_failed(bash("MINILLM_SIM_MEMORY=1M $train --log-dir $folder/log"), ExitCode::kMemory, {});
  EXPECT_EQ(folder_.read("log/metrics.jsonl"), first);
  folder_.write("log/metrics.jsonl", first + R"({"step":0,"lo)");  // what a run leaves that is killed
  ASSERT_EQ(bash("$train --set train.steps=2 --log-dir $folder/log").exit_code, 0);
  const std::vector<std::string> records = metrics();
  ASSERT_EQ(records.size(), 3u);
  EXPECT_EQ(folder_.read("log/metrics.jsonl").find(first), 0u);
  EXPECT_NE(run_of(records[0]), run_of(records[1]));
  EXPECT_EQ(run_of(records[1]), run_of(records[2]));
}

TEST_F(Output, ARunThatEndsWithoutFiniteValuesFailsAndSavesNothing) {
  write_old_weights();
  const Result result = bash(std::string("$train --set train.steps=3 --set train.optimizer.lr=1e30 "
                                         "--log-dir $folder/log") +
                             kSave);
  expect_failed(result, ExitCode::kNumerics, {"was not finite in the last ", "No weights are saved"});
  EXPECT_GT(count(result.out, "| Loss: nan |"), 0) << result;
  EXPECT_EQ(count(result.out, "-nan"), 0) << result;
  EXPECT_EQ(count(metrics().back(), "\"loss\":null,"), 1);
  expect_old_weights("");
}

TEST_F(Output, WeightsThatAreNotFiniteAreNotSaved) {
  write_old_weights();
  const Result result = bash(
      std::string("$train --set train.optimizer.lr=1e30 --set train.optimizer.weight_decay=1e10") + kSave);
  expect_failed(result, ExitCode::kNumerics, {weights() + ": is not written", "embedding.weight"});
  EXPECT_EQ(count(result.out, "Step 0 | Loss: 4."), 1) << result;
  expect_old_weights("");
}

}  // namespace
}  // namespace minillm::test
