// Training as a user starts it: what it prints and leaves behind, and what it says when something is wrong.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <regex>

#include "command.h"
#include "core/error.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

constexpr std::chrono::seconds kGoneWithin{5};

/// A model small enough for tests, on random tokens.
std::vector<std::string> tiny(const TemporaryFolder& folder, std::vector<std::string> more = {}) {
  const std::string config = folder.write("tiny.json", R"({
    "model": {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64, "causal": true},
    "train": {"steps": 3, "micro_batch": 2, "seq_len": 16}
  })");
  std::vector<std::string> arguments{"train", config};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::vector<std::string> with(std::vector<std::string> start, const std::vector<std::string>& more) {
  start.insert(start.end(), more.begin(), more.end());
  return start;
}

TEST(Train, PrintsAStepPerLine) {
  const TemporaryFolder folder;
  const Result result = minillm(tiny(folder));
  EXPECT_EQ(result.exit_code, 0) << result;
  EXPECT_EQ(result.err, "");
  const std::regex line(
      R"(Step 0 \| Loss: \d+\.\d{4} \| Peak VRAM/GPU: \d+\.\d\d GB \| \S+ s \| \S+ tok/s/GPU \| grad norm \S+\n)");
  EXPECT_TRUE(std::regex_search(result.out, line)) << result;
  EXPECT_EQ(count(result.out, "\nStep "), 3) << result;
}

TEST(Train, StopsAfter) {
  const TemporaryFolder folder;
  EXPECT_EQ(count(minillm(tiny(folder, {"--set", "train.stop_after=1"})).out, "\nStep "), 1);
}

TEST(Train, WritesMetricsAndWeightsThatGenerateReads) {
  const TemporaryFolder folder;
  const int ranks = MINILLM_WITH_MPI ? 2 : 1;
  const Result result = minillm_on(ranks, tiny(folder, {"--log-dir", folder.path("logs/deep"), "--set",
                                                        "checkpoint.dir=" + folder.path("out")}));
  EXPECT_EQ(result.exit_code, 0) << result;
  const std::string metrics = folder.read("logs/deep/metrics.jsonl");
  EXPECT_EQ(count(metrics, "\n"), 3);
  EXPECT_TRUE(metrics.starts_with("{\"step\":0,\"loss\":")) << metrics;
  for (const char* key : {"peak_vram_bytes", "step_s", "tokens_per_s_per_gpu", "grad_norm", "skipped"})
    EXPECT_EQ(count(metrics, std::string("\"") + key + "\":"), 3) << key;
  const std::vector<std::string> generate{
      "generate", folder.path("out/model.safetensors"), "--prompt", "abc", "--tokens", "5"};
  const Result text = minillm(generate);
  EXPECT_EQ(text.exit_code, 0) << text;
  EXPECT_TRUE(text.out.starts_with("abc")) << text;
  EXPECT_EQ(text.out.size(), 3u + 5u + 1u);
  EXPECT_EQ(minillm(generate).out, text.out);
}

TEST(Train, StartsFromAWeightsFileAtAnotherNumberOfRanks) {
  if (!MINILLM_WITH_MPI) GTEST_SKIP() << "needs MPI";
  const TemporaryFolder folder;
  ASSERT_EQ(minillm_on(3, tiny(folder, {"--set", "checkpoint.dir=" + folder.path("out")})).exit_code, 0);
  const std::string init = "model.init=" + folder.path("out/model.safetensors");
  const Result result = minillm_on(2, tiny(folder, {"--set", init}));
  EXPECT_EQ(result.exit_code, 0) << result;
  expect_failed(minillm(tiny(folder, {"--set", init, "--set", "model.ffn_dim=128"})), ExitCode::kInput,
                {"layers.0.ffn.up.weight", "shape"});
}

TEST(Train, DataErrors) {
  const TemporaryFolder folder;
  const auto text = [&](const std::string& path, std::vector<std::string> more = {}) {
    return minillm(with(tiny(folder, {"--set", "data.source=text", "--set", "data.path=" + path}), more));
  };
  expect_failed(text(folder.path("absent")), ExitCode::kInput, {"absent"});
  expect_failed(text(folder.write("empty", "")), ExitCode::kInput, {"empty"});
  expect_failed(text(folder.write("short", "too short")), ExitCode::kInput, {"short", "9", "17"});
  const std::string long_text = folder.write("long", std::string(100, 'a') + "\xff");
  expect_failed(text(long_text, {"--set", "model.vocab_size=200"}), ExitCode::kInput,
                {"long", "255", "200", "100"});
}

TEST(Train, UnwritableFolders) {
  const TemporaryFolder folder;
  const std::string below_a_file = folder.write("file", "") + "/logs";
  expect_failed(minillm(tiny(folder, {"--log-dir", below_a_file})), ExitCode::kInput, {below_a_file});
  expect_failed(minillm(tiny(folder, {"--set", "checkpoint.dir=" + below_a_file})), ExitCode::kInput,
                {below_a_file});
}

TEST(Train, TooLittleMemoryShowsTheTableAndWhatFits) {
  const TemporaryFolder folder;
  const std::vector<std::string> small = {"/usr/bin/env", "MINILLM_SIM_MEMORY=34M", MINILLM_PROGRAM};
  const std::vector<std::string> command =
      with(small, tiny(folder, {"--set", "train.micro_batch=64", "--set", "memory.reserve=0"}));
  expect_failed(run(command), ExitCode::kMemory,
                {"activations", "moments", "largest train.micro_batch that fits is "});
  expect_failed(run(with(small, tiny(folder))), ExitCode::kMemory,
                {"only 0 are there for it", "memory.reserve leaves 1500000000 of them"});
  const std::vector<std::string> hopeless = with({"/usr/bin/env", "MINILLM_SIM_MEMORY=1M", MINILLM_PROGRAM},
                                                 tiny(folder, {"--set", "memory.reserve=0"}));
  expect_failed(run(hopeless), ExitCode::kMemory, {"Not even train.micro_batch 1 fits"});
}

TEST(Train, CommunicatorsThatTakeMoreThanTheReserveShowTheTableToo) {
  if (!MINILLM_WITH_MPI) GTEST_SKIP() << "needs MPI";
  const TemporaryFolder folder;
  const std::vector<std::string> start = {
      MINILLM_SOURCE_DIR "/scripts/mpirun.sh", "-np",          "2", "/usr/bin/env", "MINILLM_SIM_MEMORY=68M",
      "MINILLM_SIM_NCCL_BUFFERS=16M",          MINILLM_PROGRAM};
  const std::vector<std::string> large =
      tiny(folder, {"--set", "memory.reserve=0", "--set", "train.micro_batch=256"});
  expect_failed(run(with(start, large)), ExitCode::kMemory,
                {"out of device memory", "took 33554432 bytes, and memory.reserve is 0", "activations",
                 "largest train.micro_batch that fits"});
}

TEST(Train, AFailingRankEndsAllAndIsNamed) {
  if (!MINILLM_WITH_MPI) GTEST_SKIP() << "needs MPI";
  const TemporaryFolder folder;
  const std::vector<std::string> train = tiny(folder);
  const std::vector<std::string> command =
      with(with({MINILLM_SOURCE_DIR "/scripts/mpirun.sh", "-np", "1", MINILLM_PROGRAM}, train),
           with({":", "-np", "1", "/usr/bin/env", "MINILLM_SIM_MEMORY=1M", MINILLM_PROGRAM}, train));
  expect_failed(run(command, kGoneWithin), ExitCode::kMemory, {"[rank 1] error: "});
}

TEST(Train, AnErrorBetweenStepsEndsAllRanks) {
  if (!MINILLM_WITH_MPI) GTEST_SKIP() << "needs MPI";
  const TemporaryFolder folder;
  // A disk that is full: only rank 0 writes, and the others wait for it in a collective of the next step.
  std::filesystem::create_symlink("/dev/full", folder.path("metrics.jsonl"));
  const Result result = [&] {
    std::vector<std::string> command{MINILLM_SOURCE_DIR "/scripts/mpirun.sh", "-np", "3", MINILLM_PROGRAM};
    return run(with(command, tiny(folder, {"--log-dir", folder.path("."), "--set", "train.steps=1000"})),
               kGoneWithin);
  }();
  expect_failed(result, ExitCode::kInput, {"[rank 0] error: ", "metrics.jsonl", "disk"});
}

/// A socket that takes connections and never answers.
class DeafServer {
 public:
  explicit DeafServer(const std::string& path) {
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0) << path;
    EXPECT_EQ(listen(socket_, 64), 0) << path;
  }
  ~DeafServer() { close(socket_); }
  DeafServer(const DeafServer&) = delete;
  DeafServer& operator=(const DeafServer&) = delete;

 private:
  int socket_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
};

TEST(Train, WaitsForNoDisplay) {
  if (!MINILLM_WITH_MPI) GTEST_SKIP() << "needs MPI";
  const std::vector<std::string> in_namespace{"/usr/bin/unshare", "--mount", "/bin/sh", "-c"};
  if (run(with(in_namespace, {"command -v mount"})).exit_code != 0)
    GTEST_SKIP() << "needs mount in a namespace of its own, which is root's to make";
  const TemporaryFolder folder, displays;
  const DeafServer server(displays.path("X0"));
  // Both have to keep away from it of themselves: the launcher, and a program that was started by another
  // one.
  const std::vector<std::string> ranks =
      with({"-np", "2", "/usr/bin/env", "-u", "HWLOC_COMPONENTS", MINILLM_PROGRAM},
           tiny(folder, {"--set", "train.steps=1"}));
  const Result result = run(
      with(with(in_namespace, {"mkdir -p /tmp/.X11-unix && mount --bind \"$0\" /tmp/.X11-unix && exec \"$@\"",
                               displays.path("."), MINILLM_SOURCE_DIR "/scripts/mpirun.sh"}),
           ranks),
      std::chrono::seconds(60));
  EXPECT_EQ(result.exit_code, 0) << result;
}

}  // namespace
}  // namespace minillm::test
