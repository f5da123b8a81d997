// The keys below `gemm` as a user sets them: what is printed, and the file of choices.
#include <gtest/gtest.h>

#include <regex>

#include "command.h"
#include "core/error.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

class GemmChoice : public ::testing::Test {
 protected:
  Result train(int ranks, const std::vector<std::string>& settings) const {
    std::vector<std::string> arguments{"train", config_};
    for (const std::string& setting : settings) arguments.insert(arguments.end(), {"--set", setting});
    return minillm_on(ranks, arguments);
  }
  static std::vector<std::string> losses(const Result& result) {
    const std::regex loss(R"(Step \d+ \| Loss: \S+)");
    const std::string& out = result.out;
    std::vector<std::string> found;
    for (std::sregex_iterator at(out.begin(), out.end(), loss), end; at != end; ++at)
      found.push_back(at->str());
    return found;
  }

  TemporaryFolder folder_;
  std::string config_ = folder_.write("tiny.json", R"({
    "model": {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64, "causal": true},
    "train": {"steps": 2, "micro_batch": 2, "seq_len": 16}
  })");
  std::string timed_ = "gemm.deterministic=false";
  std::string file_ = folder_.path("choices.json"), cache_ = "gemm.cache=" + file_;
};

constexpr const char* kFromFile = "(from gemm.cache)\n";

TEST_F(GemmChoice, NothingIsTimedUnlessAskedFor) {
  const Result result = train(1, {});
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(count(result.out, "candidate"), 0) << result;
}

TEST_F(GemmChoice, IsPrintedPerShapeByOneRankAndReadFromTheFile) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    if (ranks > 1 && !MINILLM_WITH_MPI) continue;
    const Result timed = train(ranks, {timed_, cache_});
    EXPECT_EQ(timed.exit_code, 0) << timed;
    EXPECT_EQ(timed.err, "");
    const int shapes = count(timed.out, "TFLOPS");
    EXPECT_GT(shapes, 10) << timed;
    EXPECT_EQ(
        count(timed.out, "gemm D[32,96] bf16 = A[32,32] bf16 * B[32,96] (transposed) + bias: candidate "), 1)
        << timed;
    EXPECT_EQ(count(timed.out, kFromFile), 0) << timed;
    const Result again = train(ranks, {timed_, cache_});
    EXPECT_EQ(again.exit_code, 0) << again;
    EXPECT_EQ(count(again.out, kFromFile), shapes) << again;
    EXPECT_EQ(losses(again), losses(timed));
    EXPECT_EQ(losses(again).size(), 2u);
    std::filesystem::remove(file_);
  }
}

TEST_F(GemmChoice, ACorruptFileIsReportedOnceAndReplaced) {
  folder_.write("choices.json", "{\"format\": 1");
  const Result result = train(1, {timed_, cache_});
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(count(result.out, "gemm.cache " + file_ + ": not valid JSON"), 1) << result;
  EXPECT_EQ(count(result.out, kFromFile), 0) << result;
  EXPECT_GT(count(train(1, {timed_, cache_}).out, kFromFile), 0);
}

TEST_F(GemmChoice, Errors) {
  const Result contradiction = train(1, {cache_});
  EXPECT_EQ(contradiction.exit_code, static_cast<int>(ExitCode::kUsage)) << contradiction;
  EXPECT_EQ(count(contradiction.err, "gemm.deterministic (true)"), 1) << contradiction;
  const Result unwritable = train(1, {timed_, "gemm.cache=" + folder_.path("absent/choices.json")});
  EXPECT_EQ(unwritable.exit_code, static_cast<int>(ExitCode::kInput)) << unwritable;
  EXPECT_EQ(count(unwritable.err, "absent/choices.json: cannot be written"), 1) << unwritable;
}

}  // namespace
}  // namespace minillm::test
