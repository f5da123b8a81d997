// Ranks that were not started alike: all end at once, and the error says how they differ.
#include <gtest/gtest.h>

#include "command.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

using Arguments = std::vector<std::string>;

constexpr std::chrono::seconds kGoneWithin{30};  // the job would end at its time limit, ten minutes

class Agreement : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!MINILLM_WITH_MPI) GTEST_SKIP() << "needs MPI";
  }

  /// Trains with these --set arguments on one rank each.
  Result train(const std::vector<Arguments>& ranks) const {
    Arguments command{MINILLM_SOURCE_DIR "/scripts/mpirun.sh"};
    for (const Arguments& settings : ranks) {
      if (command.size() > 1) command.push_back(":");
      command.insert(command.end(), {"-np", "1", MINILLM_PROGRAM, "train", config_});
      for (const std::string& setting : settings) command.insert(command.end(), {"--set", setting});
    }
    return run(command, kGoneWithin);
  }

  void expect_disagreement(const std::vector<Arguments>& ranks,
                           std::initializer_list<std::string> parts) const {
    const Result result = train(ranks);
    expect_failed(result, ExitCode::kCommunication, parts);
    expect_failed(result, ExitCode::kCommunication, {"[rank 0] error: the ranks were not started alike"});
    EXPECT_EQ(count(result.out, "Step "), 0) << result;
  }

  std::string text(const std::string& path, const std::string& content) const {
    return folder_.write(path, content);
  }

  TemporaryFolder folder_;
  std::string config_ = folder_.write("tiny.json", R"({
    "model": {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64, "causal": true},
    "train": {"steps": 2, "micro_batch": 2, "seq_len": 16}
  })");
};

TEST_F(Agreement, EachDifferentKeyIsNamedWithValuesAndRanks) {
  expect_disagreement(
      {{}, {"train.optimizer.lr=0.001", "train.seed=7", "model.causal=false", "train.steps=3"}},
      {"train.optimizer.lr is 0.0003 on rank 0 and 0.001 on rank 1\n",
       "train.seed is 0 on rank 0 and 7 on rank 1\n", "model.causal is true on rank 0 and false on rank 1\n",
       "train.steps is 2 on rank 0 and 3 on rank 1\n"});
  expect_disagreement({{}, {"parallel.policy=grads"}, {}},
                      {"parallel.policy is \"full\" on ranks 0, 2 and \"grads\" on rank 1\n"});
  expect_disagreement(
      {{}, {"model.dim=16"}, {"model.dim=48"}, {}},
      {"model.dim is 32 on ranks 0, 3, 16 on rank 1 and 48 on rank 2\n", "the number of parameters is "});
}

TEST_F(Agreement, AFolderOnOneRankOnly) {
  expect_disagreement({{"checkpoint.dir=" + folder_.path("out")}, {}},
                      {"checkpoint.dir is set on rank 0 and not set on rank 1\n"});
}

TEST_F(Agreement, DataFilesOfOtherNamesOrSizes) {
  for (const char* name : {"a", "b"}) std::filesystem::create_directory(folder_.path(name));
  text("a/1.txt", std::string(100, 'x')), text("b/1.txt", std::string(100, 'x'));
  text("a/2.txt", std::string(200, 'x')), text("b/2.txt", std::string(201, 'x'));
  const auto data = [&](const std::string& path) {
    return Arguments{"data.source=text", "data.path=" + folder_.path(path)};
  };
  const Result same = train({data("a/1.txt"), data("b/1*")});
  EXPECT_EQ(same.exit_code, 0) << same;
  expect_disagreement({data("a/*"), data("b/*")},
                      {"data file 2 is '2.txt' of 200 bytes on rank 0 and '2.txt' of 201 bytes on rank 1\n"});
  expect_disagreement({data("a/1.txt"), data("a/*"), data("a/none")},
                      {"data file 2 is absent on ranks 0, 2 and '2.txt' of 200 bytes on rank 1\n",
                       "data file 1 is '1.txt' of 100 bytes on ranks 0, 1 and absent on rank 2\n", "a/none"});
}

TEST_F(Agreement, InitialWeightsOfOtherContents) {
  for (const char* seed : {"1", "2"}) {
    const std::string out = folder_.path(seed);
    ASSERT_EQ(minillm({"train", config_, "--set", "train.seed=" + std::string(seed), "--set",
                       "checkpoint.dir=" + out})
                  .exit_code,
              0);
  }
  std::filesystem::create_directory(folder_.path("copy"));
  std::filesystem::copy_file(folder_.path("1/model.safetensors"), folder_.path("copy/model.safetensors"));
  const auto init = [&](const std::string& path) {
    return Arguments{"model.init=" + folder_.path(path) + "/model.safetensors"};
  };
  const Result same = train({init("1"), init("copy")});
  EXPECT_EQ(same.exit_code, 0) << same;
  expect_disagreement({init("1"), init("1"), init("2")}, {"model.init is a file of ", "checksum",
                                                          " on ranks 0, 1 and a file of ", " on rank 2\n"});
  expect_disagreement({init("1"), {}},
                      {"model.init is a file of ", " on rank 0 and \"pytorch\" on rank 1\n"});
}

TEST_F(Agreement, AChoiceFromOtherHardware) {
  const auto on = [](const std::string& hardware) {
    return Arguments{"parallel.policy=auto", "parallel.hardware=" + hardware};
  };
  expect_disagreement({on("h100"), on("a100")},
                      {"the hardware that parallel.policy auto takes times from is ", " on rank 0 and "});
}

TEST_F(Agreement, AnErrorOfOneRankBeforeItEndsAll) {
  expect_failed(train({{}, {"train.seed=-1"}, {}}), ExitCode::kUsage,
                {"[rank 1] error: ", "'train.seed' is -1"});
  expect_failed(train({{"train.sed=1"}, {}}), ExitCode::kUsage, {"[rank 0] error: ", "train.seed"});
  const Result absent = run({MINILLM_SOURCE_DIR "/scripts/mpirun.sh", "-np", "1", MINILLM_PROGRAM, "train",
                             config_, ":", "-np", "1", MINILLM_PROGRAM, "train", folder_.path("absent.json")},
                            kGoneWithin);
  expect_failed(absent, ExitCode::kInput, {"[rank 1] error: ", "absent.json"});
  const Result option = run({MINILLM_SOURCE_DIR "/scripts/mpirun.sh", "-np", "1", MINILLM_PROGRAM, "train",
                             config_, ":", "-np", "1", MINILLM_PROGRAM, "train", config_, "--bogus"},
                            kGoneWithin);
  expect_failed(option, ExitCode::kUsage, {"[rank 1] error: ", "--bogus"});
}

}  // namespace
}  // namespace minillm::test
