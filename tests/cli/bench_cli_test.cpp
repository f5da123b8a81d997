// `minillm bench` as a user runs it, and that what it counts is what docs/kernels.md says.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <set>

#include "command.h"
#include "core/error.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

const std::string kReference = MINILLM_SOURCE_DIR "/configs/minillm.json";

class Bench : public ::testing::Test {
 protected:
  static void expect_failure(const std::vector<std::string>& arguments, ExitCode code,
                             std::initializer_list<std::string> parts) {
    std::vector<std::string> command{"bench"};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const Result result = minillm(command);
    expect_failed(result, code, parts);
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(result.err.starts_with("error: ")) << result;
  }
  /// The distinct strings that `text` has in the group of `pattern`.
  static std::set<std::string> all_matches(const std::string& text, const char* pattern) {
    const std::regex expression(pattern);
    std::set<std::string> found;
    for (std::sregex_iterator at(text.begin(), text.end(), expression), end; at != end; ++at)
      found.insert(at->str(1));
    return found;
  }

  TemporaryFolder folder_;
  std::string json_ = folder_.path("bench.json");
  // Three chunks of the head, the last of them short; sizes that make all products different.
  std::string tiny_ = folder_.write("tiny.json", R"({
    "model": {"vocab_size": 200, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 80, "final_norm": true},
    "train": {"steps": 1, "micro_batch": 2, "seq_len": 20, "head_chunk": 16}
  })");
};

TEST_F(Bench, Help) {
  const Result help = minillm({"bench", "--help"});
  EXPECT_EQ(help.exit_code, 0) << help;
  for (const char* part : {"CONFIG", "--set KEY=VALUE", "--only REGEX", "--json FILE", "--repeats N", "20",
                           "--ranks N", "simulated device"})
    EXPECT_GT(count(help.out, part), 0) << part << "\n" << help;
  EXPECT_GT(count(minillm({"--help"}).out, "\n  bench "), 0);
}

TEST_F(Bench, PrintsTheTableOfTheManual) {
  if (!MINILLM_SIMULATED) GTEST_SKIP() << "a GPU's table has times, too";
  const Result result = minillm({"bench", kReference});
  EXPECT_EQ(result.exit_code, 0) << result;
  std::ifstream file(MINILLM_SOURCE_DIR "/docs/kernels.md");
  const std::string manual{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(count(manual, "```\n" + result.out + "```\n"), 1)
      << "docs/kernels.md has to show what the program prints:\n"
      << result;
}

TEST_F(Bench, WritesTheSameAsJson) {
  const Result result =
      minillm({"bench", tiny_, "--json", json_, "--repeats", "3", "--set", "train.steps=2"});
  EXPECT_EQ(result.exit_code, 0) << result;
  const std::string json = folder_.read("bench.json");
  const std::set<std::string> names = all_matches(json, R"re("name": "([a-z_]+[^"]*)")re");
  EXPECT_GT(names.size(), 40u);
  for (const std::string& name : names) EXPECT_GT(count(result.out, "\n" + name + " "), 0) << name;
  for (const char* key : {"multiprocessors", "driver", "steps\": 2", "head_chunk\": 16", "minimal_bytes",
                          "extra_bytes", "minimal_flops"})
    EXPECT_GT(count(json, key), 0) << key;
  for (const char* key :
       {"copy_bandwidth_bytes_per_s", "gemm_rate_flops_per_s", "median_s", "floor_s", "percent_of_floor"})
    EXPECT_EQ(count(json, key) > 0, !MINILLM_SIMULATED) << key;
  EXPECT_EQ(count(result.out, "simulated device: counts only\n"), MINILLM_SIMULATED) << result;
}

TEST_F(Bench, ProductsAreThoseOfTraining) {
  EXPECT_EQ(minillm({"bench", tiny_, "--json", json_, "--repeats", "1"}).exit_code, 0);
  const Result trained = minillm({"train", tiny_, "--set", "gemm.deterministic=false"});
  EXPECT_EQ(trained.exit_code, 0) << trained;
  const std::set<std::string> of_training = all_matches(trained.out, "(gemm D.*): candidate");
  EXPECT_EQ(of_training.size(), 19u) << trained;
  EXPECT_EQ(all_matches(folder_.read("bench.json"), "\"product\": \"(.*)\""), of_training);
}

TEST_F(Bench, Only) {
  const Result result = minillm({"bench", tiny_, "--only", "^rope|cross_entropy$"});
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(count(result.out, "\ncross_entropy "), 1) << result;
  EXPECT_EQ(count(result.out, "\nrope "), 1) << result;
  EXPECT_EQ(count(result.out, "last chunk") + count(result.out, "gemm"), 0) << result;
}

TEST_F(Bench, RanksShareTheOptimizer) {
  const Result result = minillm({"bench", tiny_, "--ranks", "8"});
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_GT(count(result.out, ", 8 ranks\n"), 0) << result;
}

TEST_F(Bench, Errors) {
  expect_failure({}, ExitCode::kUsage, {"CONFIG"});
  expect_failure({"absent.json"}, ExitCode::kInput, {"absent.json", "No such file"});
  expect_failure({tiny_, "--set", "model.n_heads=5"}, ExitCode::kUsage, {"model.n_heads (5)"});
  expect_failure({tiny_, "--only", "("}, ExitCode::kUsage, {"--only (", "regular expression"});
  expect_failure({tiny_, "--only", std::string(100000, '(')}, ExitCode::kUsage, {"--only", "at most 200"});
  expect_failure({tiny_, "--only", "softmax"}, ExitCode::kUsage, {"--only softmax", "\n  cross_entropy\n"});
  expect_failure({tiny_, "--repeats", "0"}, ExitCode::kUsage, {"--repeats is '0'", "from 1 to 1000"});
  expect_failure({tiny_, "--ranks", "0"}, ExitCode::kUsage, {"--ranks is '0'"});
  expect_failure({tiny_, "--json", folder_.path("absent/bench.json")}, ExitCode::kInput,
                 {"absent/bench.json", "No such file"});
}

}  // namespace
}  // namespace minillm::test
