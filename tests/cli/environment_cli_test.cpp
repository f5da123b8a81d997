// What minillm makes of its surroundings: variables of the environment, cores, the version of NCCL, nodes.
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "command.h"
#include "tests/unit/temporary_folder.h"

namespace minillm::test {
namespace {

/// A variable of the environment of the programs that are run while it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

/// Programs that are run while it lives may use one processor.
class OneProcessor {
 public:
  OneProcessor() {
    EXPECT_EQ(sched_getaffinity(0, sizeof before_, &before_), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    int first = 0;
    while (!CPU_ISSET(first, &before_)) ++first;
    CPU_SET(first, &one);
    EXPECT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  }
  ~OneProcessor() { EXPECT_EQ(sched_setaffinity(0, sizeof before_, &before_), 0); }
  OneProcessor(const OneProcessor&) = delete;
  OneProcessor& operator=(const OneProcessor&) = delete;

 private:
  cpu_set_t before_;
};

/// Two processors may be the threads of one core.
bool has_several_cores() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
  std::string siblings;
  std::getline(file, siblings);
  const long processors = sysconf(_SC_NPROCESSORS_CONF);
  return processors > 2 || (processors == 2 && siblings.find_first_of(",-") == std::string::npos);
}

std::vector<std::string> train(const TemporaryFolder& folder, const std::string& graph = "false") {
  const std::string config = folder.write("tiny.json", R"({
    "model": {"vocab_size": 256, "dim": 32, "n_layers": 2, "n_heads": 2, "ffn_dim": 64},
    "train": {"steps": 3, "micro_batch": 2, "seq_len": 16}
  })");
  return {"train", config, "--set", "train.cuda_graph=" + graph};
}

TEST(Environment, RanksBoundToACoreAreWarnedOf) {
  const TemporaryFolder folder;
  const OneProcessor bound;
  const int ranks = MINILLM_WITH_MPI ? 2 : 1;
  const Result result = minillm_on(ranks, train(folder));
  EXPECT_EQ(result.exit_code, 0) << result;
  if (!has_several_cores()) GTEST_SKIP() << "the machine has one core";
  EXPECT_EQ(
      count(result.out, ranks == 1 ? "warning: rank 0 is bound to one core of "
                                   : "warning: 2 of 2 ranks, the first is 0, are each bound to one core of "),
      1)
      << result;
}

#if MINILLM_SIMULATED
TEST(Environment, AsksForConnectionsBeforeTheDeviceIsUsed) {
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const TemporaryFolder folder;
  {
    const Variable wanted("MINILLM_SIM_CONNECTIONS", "32");
    const Result result = minillm(train(folder));
    EXPECT_EQ(result.exit_code, 0) << result;
  }
  const Variable chosen("CUDA_DEVICE_MAX_CONNECTIONS", "8");
  const Variable wanted("MINILLM_SIM_CONNECTIONS", "8");
  const Result result = minillm(train(folder));
  EXPECT_EQ(result.exit_code, 0) << "the user's choice was replaced\n" << result;
}

#if MINILLM_WITH_MPI
TEST(Environment, TheVersionOfNcclDecidesWhatItIsAskedFor) {
  const TemporaryFolder folder;
  const auto lines = [&](const char* version) {
    const Variable nccl("MINILLM_SIM_NCCL_VERSION", version);
    const Result result = minillm_on(2, train(folder));
    EXPECT_EQ(result.exit_code, 0) << result;
    EXPECT_EQ(count(result.out, "\nStep "), 3) << result;
    const size_t begin = result.out.find("\ngather: ") + 1;
    return result.out.substr(begin, result.out.find('\n', result.out.find("\nreduce: ") + 1) - begin);
  };
  EXPECT_EQ(
      lines("2.28.9"),
      "gather: copy engines in symmetric windows (NCCL 2.28.9)\n"
      "reduce: NCCL's kernels; no symmetric windows: kernels may read them too early, which NCCL 2.30.7 "
      "mends (NCCL 2.28.9)");
  EXPECT_EQ(
      lines("2.30.7"),
      "gather: NCCL's kernels in symmetric windows; no copy engines: two ranks of a node may wait for each "
      "other for ever, which NCCL 2.31.2 mends (NCCL 2.30.7)\n"
      "reduce: NCCL's kernels in symmetric windows (NCCL 2.30.7)");
}

TEST(Environment, AGraphBetweenNodesIsRemarkedOnOnce) {
  const TemporaryFolder folder;
  const auto remarks = [&](const char* version, const std::string& graph) {
    const Variable nccl("MINILLM_SIM_NCCL_VERSION", version);
    std::vector<std::string> command{MINILLM_SOURCE_DIR "/scripts/mpirun.sh"};
    for (const char* node : {"a", "b"}) {
      if (command.size() > 1) command.emplace_back(":");
      for (const std::string& word : {std::string("-np"), std::string("1"), std::string("-x"),
                                      std::string("NCCL_HOSTID=") + node, std::string(MINILLM_PROGRAM)})
        command.push_back(word);
      for (const std::string& word : train(folder, graph)) command.push_back(word);
    }
    const Result result = run(command);
    EXPECT_EQ(result.exit_code, 0) << result;
    return count(result.out, "warning: a CUDA graph with collectives between nodes may deadlock with NCCL ");
  };
  EXPECT_EQ(remarks("2.30.3", "true"), 1);
  EXPECT_EQ(remarks("2.30.3", "false"), 0);
  EXPECT_EQ(remarks("2.30.4", "true"), 0);
}
#endif
#endif

}  // namespace
}  // namespace minillm::test
